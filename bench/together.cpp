// Preloaded by bench/heap.py: Gloo workers of a process that complete collectives within 3 ms of each other go on in the
// same instant. ProcessGroupGloo::runLoop asks for the name of a collective right before it keeps it in the group's
// status; this stands in for the function that it asks.
#include <atomic>
#include <chrono>
#include <cstring>
#include <dlfcn.h>
#include <pthread.h>
#include <string>

namespace c10d {
enum class OpType : unsigned char;
std::string opTypeToString(OpType type);
} // namespace c10d

namespace {

using Clock = std::chrono::steady_clock;
std::atomic<int> waiting{0};
std::atomic<long> meetings{0};

bool in_worker() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strcmp(name, "pt_gloo_runloop") == 0;
}

void meet() {
  const long before = meetings;
  if (waiting.fetch_add(1) == 1) {
    waiting = 0;
    ++meetings;
    return;
  }
  const auto end = Clock::now() + std::chrono::milliseconds(3);
  while (meetings == before) {
    if (Clock::now() > end) {
      int alone = 1;
      waiting.compare_exchange_strong(alone, 0);
      return;
    }
  }
}

} // namespace

std::string c10d::opTypeToString(OpType type) {
  using Function = std::string (*)(OpType);
  static const auto original = reinterpret_cast<Function>(
      dlsym(dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY), "_ZN4c10d14opTypeToStringB5cxx11ENS_6OpTypeE"));
  auto name = original(type);
  if (in_worker())
    meet();
  return name;
}
