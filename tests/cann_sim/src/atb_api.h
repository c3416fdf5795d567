// libatb: the classes whose mangled names and vtables callers rely on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "nn_paged_load.h"

namespace atb {

using Status = int32_t;

// vtable: 0 and 1 destructors, 2 SetExecuteStream, 3 GetExecuteStream, ...
class Context {
 public:
  virtual ~Context() = default;
  virtual Status SetExecuteStream(void* stream) = 0;
  virtual void* GetExecuteStream() const = 0;
  virtual Status SetAsyncTilingCopyStatus(bool status) = 0;
  virtual bool GetAsyncTilingCopyStatus() const = 0;
};

struct TensorDesc;
struct VariantPack;
template <typename T>
class SVector;

// vtable: 0 and 1 destructors, 2 GetName, 3 InferShape, 4 GetInputNum,
// 5 GetOutputNum, 6 Setup, 7 Execute. What the C functions drive has no use
// for the last five.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::string GetName() const = 0;
  virtual Status InferShape(const SVector<TensorDesc>&,
                            SVector<TensorDesc>&) const;
  virtual uint32_t GetInputNum() const;
  virtual uint32_t GetOutputNum() const;
  virtual Status Setup(const VariantPack&, uint64_t&, Context*);
  virtual Status Execute(const VariantPack&, uint8_t*, uint64_t, Context*);
};

__attribute__((visibility("default"))) Status CreateContext(Context** out);
__attribute__((visibility("default"))) Status DestroyContext(Context* context);
__attribute__((visibility("default"))) Status
DestroyOperation(Operation* operation);

}  // namespace atb

namespace cann_sim {

enum AtbStatus {
  kAtbOk = 0,
  kAtbInvalidParam = 1,
  kAtbInvalidInTensorNum = 5,
  kAtbInvalidTensorDim = 8,
  kAtbInvalidTensorSize = 9,
  kAtbInvalidTensorIniMatch = 13,
  kAtbInvalidTensorDimNum = 16,
  kAtbInvalidOperationAddr = 24,
};

constexpr const char* kContextKind = "atb::Context";
constexpr const char* kOperationKind = "atb::Operation";

// Bound to the device and, for the strict reading, to the thread that made
// it.
class SimContext : public atb::Context {
 public:
  SimContext();
  ~SimContext() override;
  atb::Status SetExecuteStream(void* stream) override;
  void* GetExecuteStream() const override { return stream_; }
  atb::Status SetAsyncTilingCopyStatus(bool) override { return kAtbOk; }
  bool GetAsyncTilingCopyStatus() const override { return false; }

  // Records context_thread and context_device.
  void check_use(const char* op) const;

  // The device memory of its tiling buffers: a kernel reads it when it runs,
  // so the context must not be destroyed before.
  void* memory() const { return memory_; }
  void give_back_memory();
  static bool check_memory(const Run& run, void* memory);

 private:
  void* stream_ = nullptr;
  void* memory_ = nullptr;
  int device_;
  std::thread::id thread_;
};

class PagedCacheLoadOperation : public atb::Operation {
 public:
  std::string GetName() const override { return "PagedCacheLoadOperation"; }

  bool nz = false;
  bool cumulative = false;
  std::thread::id thread = std::this_thread::get_id();
  // State of the last Setup.
  bool ready = false;
  atb::Context* context = nullptr;
  std::vector<TensorInfo> tensors;
  uint64_t workspace_bytes = 0;
};

}  // namespace cann_sim
