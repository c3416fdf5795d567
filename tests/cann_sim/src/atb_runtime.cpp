// libatb: contexts, operations, and the operators that are not simulated.
#include "atb_api.h"

#include "acl_codes.h"
#include "journal.h"
#include "memory.h"
#include "stream.h"

#include <utility>

namespace cann_sim {
namespace {

// What a context takes for its tiling buffers: 32 of 3 MiB.
constexpr size_t kContextBytes = size_t{96} << 20;

}  // namespace

SimContext::SimContext()
    : memory_(device_malloc(current_device(), kContextBytes, nullptr)),
      device_(current_device()),
      thread_(std::this_thread::get_id()) {}

SimContext::~SimContext() { give_back_memory(); }

void SimContext::give_back_memory() {
  if (memory_) device_free(std::exchange(memory_, nullptr));
}

bool SimContext::check_memory(const Run& run, void* memory) {
  return !memory || host_view(memory, kContextBytes, Access::kRead, run,
                              "tiling buffers of the context", false);
}

atb::Status SimContext::SetExecuteStream(void* stream) {
  if (int code = enter("atb::Context::SetExecuteStream")) return code;
  if (!handle_live(kContextKind, this, "atb::Context::SetExecuteStream")) {
    return kAtbInvalidParam;
  }
  check_use("atb::Context::SetExecuteStream");
  if (stream && !find_stream(stream, "atb::Context::SetExecuteStream")) {
    return kAtbInvalidParam;
  }
  stream_ = stream;
  return kAtbOk;
}

void SimContext::check_use(const char* op) const {
  if (std::this_thread::get_id() != thread_) {
    violation("context_thread", op,
              "an atb::Context is used by another thread than made it");
  }
  if (current_device() != device_) {
    violation("context_device", op,
              format("an atb::Context of device %d is used on device %d",
                     device_, current_device()));
  }
}

namespace {

int missing(const char* name) {
  violation("missing_operator", name,
            "the simulated ATB has PagedCacheLoad and ReshapeAndCache only");
  set_error(std::string("cann_sim: ATB operation ") + name +
            " is not simulated");
  return kAtbInvalidParam;
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

namespace atb {

Status CreateContext(Context** out) {
  if (int code = enter("atb::CreateContext")) return code;
  if (!out) return kAtbInvalidParam;
  SimContext* context = new SimContext;
  handle_created(kContextKind, static_cast<Context*>(context),
                 __builtin_return_address(0));
  *out = context;
  return kAtbOk;
}

Status DestroyContext(Context* context) {
  int injected = enter("atb::DestroyContext");
  if (!context) return kAtbInvalidParam;
  if (handle_known(kContextKind, context)) {
    static_cast<SimContext*>(context)->give_back_memory();
  }
  bool fine = handle_retired(kContextKind, context, "atb::DestroyContext",
                             [context] { delete context; });
  return fine ? injected : kAtbInvalidParam;
}

Status DestroyOperation(Operation* operation) {
  int injected = enter("atb::DestroyOperation");
  if (!operation) return kAtbInvalidOperationAddr;
  bool fine = handle_retired(kOperationKind, operation, "atb::DestroyOperation",
                             [operation] { delete operation; });
  return fine ? injected : kAtbInvalidOperationAddr;
}

// ---- named by libop_plugin_atb.so, refused here -----------------------------

Status Operation::InferShape(const SVector<TensorDesc>&,
                             SVector<TensorDesc>&) const {
  return missing("Operation::InferShape");
}

uint32_t Operation::GetInputNum() const {
  missing("Operation::GetInputNum");
  return 0;
}

uint32_t Operation::GetOutputNum() const {
  missing("Operation::GetOutputNum");
  return 0;
}

Status Operation::Setup(const VariantPack&, uint64_t&, Context*) {
  return missing("Operation::Setup");
}

Status Operation::Execute(const VariantPack&, uint8_t*, uint64_t, Context*) {
  return missing("Operation::Execute");
}

namespace infer {
struct LinearParam;
struct ElewiseParam;
struct RmsNormParam;
struct GroupTopkParam;
struct SelfAttentionParam;
struct PagedAttentionParam;
struct RopeParam;
}  // namespace infer

template <typename Param>
Status CreateOperation(const Param& param, Operation** operation);

#define MISSING(Param)                                                         \
  template <>                                                                  \
  __attribute__((visibility("default"))) Status CreateOperation<infer::Param>( \
      const infer::Param&, Operation**) {                                      \
    return missing(#Param);                                                    \
  }

MISSING(LinearParam)
MISSING(ElewiseParam)
MISSING(RmsNormParam)
MISSING(GroupTopkParam)
MISSING(SelfAttentionParam)
MISSING(PagedAttentionParam)
MISSING(RopeParam)

}  // namespace atb
