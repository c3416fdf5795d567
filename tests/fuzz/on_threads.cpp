// Calls on several threads at once, for ThreadSanitizer: on_threads FOLDER.
//
// First every call that the files of the folder (the fuzzer's corpus) stand
// for, made by eight threads at the same time, each call divided among more
// threads and held against what it must do (check.h). The very first calls
// meet, so the initialisation of whatever is kept between calls is seen too.
// Then one cache for all threads: each writes slots of its own and reads them
// back while the others write theirs.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using pacache::testing::Outcome;

constexpr int kThreads = 8;

template <typename F>
void on_every_thread(const F& f) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&f, t] { f(t); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

std::vector<std::vector<uint8_t>> read_files(const char* folder) {
  std::vector<std::vector<uint8_t>> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(file),
                       std::istreambuf_iterator<char>());
  }
  return files;
}

void each_its_own_memory(const std::vector<std::vector<uint8_t>>& files) {
  for (const bool deterministic : {false, true}) {
    at::globalContext().setDeterministicAlgorithms(deterministic, false);
    std::atomic<int> done = 0, refused = 0;
    on_every_thread([&](int thread) {
      for (size_t i = 0; i < files.size(); ++i) {
        const auto& file = files[(i + thread * 37) % files.size()];
        switch (pacache::testing::check_on_threads(file.data(), file.size(),
                                                   deterministic)) {
          case Outcome::kDone:
            ++done;
            break;
          case Outcome::kRefused:
            ++refused;
            break;
          default:
            break;
        }
      }
    });
    std::printf("deterministic %d: %d calls done, %d refused\n", deterministic,
                done.load(), refused.load());
    if (done == 0 || refused == 0) {
      std::exit(1);
    }
  }
}

void all_one_cache() {
  constexpr int64_t kTokens = 24, kHeads = 3, kSize = 40, kBlockSize = 8;
  constexpr int64_t kBlocks = kThreads * kTokens / kBlockSize;
  const auto scatter =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("pacache::scatter_pa_kv_cache", "")
          .typed<void(const at::Tensor&, const std::optional<at::Tensor>&,
                      const at::Tensor&, const std::optional<at::Tensor>&,
                      const at::Tensor&, const std::optional<at::Tensor>&,
                      const std::optional<at::Tensor>&,
                      const std::optional<at::Tensor>&, c10::string_view,
                      c10::string_view, at::OptionalIntArrayRef,
                      at::OptionalIntArrayRef)>();
  const auto load =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("pacache::paged_cache_load", "")
          .typed<void(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      const std::optional<at::Tensor>&, c10::string_view,
                      bool)>();
  at::globalContext().setDeterministicAlgorithms(false, false);
  const auto cache = [] {
    return at::zeros({kBlocks, kBlockSize, kHeads, kSize}, at::kHalf);
  };
  const at::Tensor key_cache = cache(), value_cache = cache();
  std::atomic<int> wrong = 0;
  on_every_thread([&](int thread) {
    pacache::testing::division() = {3, true};
    for (int round = 0; round < 20; ++round) {
      const at::Tensor key =
          at::full({kTokens, kHeads, kSize}, thread + 8 * round, at::kHalf);
      const at::Tensor value = key + 0.5;
      const at::Tensor slots =
          at::arange(thread * kTokens, (thread + 1) * kTokens, at::kInt);
      scatter.call(key, value, key_cache, value_cache, slots, std::nullopt,
                   std::nullopt, std::nullopt, "Norm", "None", std::nullopt,
                   std::nullopt);
      constexpr int64_t kOwn = kTokens / kBlockSize;
      const at::Tensor table =
          at::arange(thread * kOwn, (thread + 1) * kOwn, at::kInt)
              .view({1, -1});
      const at::Tensor lens = at::full({1}, kTokens, at::kInt);
      const at::Tensor key_rows = at::empty_like(key);
      const at::Tensor value_rows = at::empty_like(value);
      load.call(key_cache, value_cache, table, lens, key_rows, value_rows,
                std::nullopt, "Norm", false);
      wrong += !key_rows.equal(key) || !value_rows.equal(value);
    }
  });
  std::printf("one cache: %d of %d reads wrong\n", wrong.load(), kThreads * 20);
  if (wrong != 0) {
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: on_threads FOLDER\n");
    return 2;
  }
  at::set_num_threads(1);  // of torch's own kernels: libgomp's are not seen
  pacache::testing::prepare();
  each_its_own_memory(read_files(argv[1]));
  all_one_cache();
  return 0;
}
