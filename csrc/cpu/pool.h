// One set of threads for all of the library's work. The caller works too, so there is one thread less than workers.
#pragma once

#include <stddef.h>

namespace kvasir {

using Task = void (*)(void *context, int task);

// How many threads, and on which CPUs (null: those the process may use); how many the system granted. What others compute
// meanwhile ends on the threads it has.
int configure_pool(int threads, const int *cpus);
int pool_threads();

// Runs tasks 0 .. count - 1 and returns when all are done. Each worker begins with its own share, so that what it
// touched before is near, and helps others when it is through. Calls from several threads take turns.
void run_tasks(int count, Task task, void *context);

template <class F>
void parallel(int count, const F &f) {
  run_tasks(count, [](void *context, int task) { (*(const F *)context)(task); }, (void *)&f);
}

// Memory for the calling thread's own use, of at least `bytes`, 64-byte aligned; `slot` tells several apart. What it held
// is lost when it grows.
void *thread_buffer(int slot, size_t bytes);

}  // namespace kvasir
