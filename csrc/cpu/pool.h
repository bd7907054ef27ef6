// One set of threads for all of the library's work. The caller works too, so there is one thread less than workers.
#pragma once

#include <stddef.h>

namespace kvasir {

using Task = void (*)(void *context, int task);

// Sets the number of threads and their CPUs (null: those the process may use). Returns how many the system granted. Work
// that runs meanwhile ends on the old threads.
int configure_pool(int threads, const int *cpus);
int pool_threads();

// Runs tasks 0 .. count - 1 and returns when all are done. Each worker begins with its own share, whose
// memory it has cached, and then helps the others. Calls from several threads take turns.
void run_tasks(int count, Task task, void *context);

template <class F>
void parallel(int count, const F &f) {
  run_tasks(count, [](void *context, int task) { (*(const F *)context)(task); }, (void *)&f);
}

// At least `bytes` of memory for the calling thread, 64-byte aligned; `slot` distinguishes several buffers. The content is
// lost when a buffer grows.
void *thread_buffer(int slot, size_t bytes);

}  // namespace kvasir
