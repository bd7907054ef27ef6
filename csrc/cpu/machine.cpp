// Detects what the CPU can run and chooses the instruction set. This is safe everywhere: only announced instructions are
// executed, and AMX, which may be announced and still not work, is tried in a separate process.
#include "machine.h"

#include <string.h>

#include <atomic>
#include <string>
#include <vector>

#include "kvasir_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <errno.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#endif
#endif

namespace kvasir {

#if defined(__x86_64__)
bool amx_works();  // isa_amx.cpp: a small product, which may raise SIGILL

namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

// The registers that the operating system saves when it switches threads.
uint64_t kept_registers() {
  if (!(cpuid(1, 0).c & bit_OSXSAVE)) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

[[maybe_unused]] bool has_avx2() {
  Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  return (kept_registers() & 6) == 6 && (one.c & bit_FMA) && (one.c & bit_F16C) && (seven.b & bit_AVX2);
}

[[maybe_unused]] bool has_avx512() {
  unsigned wanted = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
  Registers seven = cpuid(7, 0), more = cpuid(7, 1);
  return has_avx2() && (kept_registers() & 0xe6) == 0xe6 && (seven.b & wanted) == wanted &&
         (seven.c & bit_AVX512VNNI) && (more.a & (1u << 5));  // bfloat16
}

#if defined(__linux__)
// Whether a check returns true in a separate process, which it may crash. The answer comes through a pipe, because a
// program that ignores SIGCHLD cannot read a child's exit status.
[[maybe_unused]] bool survives(bool (*check)()) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  pid_t child = fork();
  if (child == 0) {
    char yes = 1;
    _exit(check() && write(ends[1], &yes, 1) == 1 ? 0 : 1);
  }
  close(ends[1]);
  char answer = 0;
  ssize_t got = 0;
  while (child > 0 && (got = read(ends[0], &answer, 1)) < 0 && errno == EINTR) continue;
  close(ends[0]);
  while (child > 0 && waitpid(child, nullptr, 0) < 0 && errno == EINTR) continue;
  return got == 1 && answer == 1;
}
#endif

[[maybe_unused]] bool has_amx() {
#if defined(KVASIR_EMULATED_TILES)  // tests/emulated_tiles.h emulates instructions that this CPU may lack
  return has_avx512();
#elif defined(__linux__) && defined(KVASIR_ISA_AMX)
  unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  if (!has_avx512() || (cpuid(7, 0).d & wanted) != wanted || !(kept_registers() >> 17 & 1)) return false;
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) != 0) return false;
  return survives(amx_works);
#else
  return false;
#endif
}

}  // namespace
#endif

namespace {

const std::vector<const Kernels *> &usable() {
  static const std::vector<const Kernels *> found = [] {
    std::vector<const Kernels *> sets;
#if defined(__x86_64__)
// build.py finds out which instruction sets the compiler knows.
#if defined(KVASIR_ISA_AMX)
    if (has_amx()) sets.push_back(amx_kernels());
#endif
#if defined(KVASIR_ISA_AVX512)
    if (has_avx512()) sets.push_back(avx512_kernels());
#endif
#if defined(KVASIR_ISA_AVX2)
    if (has_avx2()) sets.push_back(avx2_kernels());
#endif
#endif
    sets.push_back(portable_kernels());
    return sets;
  }();
  return found;
}

std::atomic<const Kernels *> chosen{nullptr};

}  // namespace

const Kernels &kernels() {
  const Kernels *set = chosen.load(std::memory_order_acquire);
  if (!set) chosen.store(set = usable().front(), std::memory_order_release);
  return *set;
}

}  // namespace kvasir

using namespace kvasir;

const char *kv_instruction_set() { return kernels().name; }

int32_t kv_use_instruction_set(const char *name) {
  for (const Kernels *set : usable())
    if (strcmp(set->name, name) == 0) {
      chosen.store(set, std::memory_order_release);
      return 1;
    }
  return 0;
}

const char *kv_instruction_sets() {
  static const std::string names = [] {
    std::string all;
    for (const Kernels *set : usable()) all += (all.empty() ? "" : " ") + std::string(set->name);
    return all;
  }();
  return names.c_str();
}
