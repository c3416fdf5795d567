// libacl_op_compiler: the old aclop path.
//
// torch_npu 2.13.0 makes strided tensors dense through it (Transpose,
// AsStrided, Slice, BroadcastTo, ...). An operator that is not here, because
// torch_npu found no aclnn function for it either, is a violation and fails
// with its name.
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "acl_codes.h"
#include "aclop_descriptors.h"
#include "journal.h"
#include "memory.h"
#include "nn_view.h"
#include "settings.h"
#include "stream.h"

using namespace cann_sim;

namespace {

// Inputs and outputs of one call; integer inputs that live on the host were
// read when the call was made, as the real compiler does.
struct Aclop {
  std::vector<TensorInfo> tensors;              // inputs, then outputs
  std::vector<std::vector<int64_t>> constants;  // per input, host ones only
  int inputs = 0;
  int output() const { return inputs; }
};

using Body = void (*)(const Aclop&, const Call&);

std::vector<int64_t> constant(const Aclop& op, const Call& call, int input) {
  if (!op.constants[input].empty()) return op.constants[input];
  View v = open_view(call, input, Access::kRead, "constant");
  return v.ok && v.base ? read_integers(v) : std::vector<int64_t>();
}

// y = x seen through dims, strides and an offset in elements.
void strided(const Call& call, int x, int y, const std::vector<int64_t>& dims,
             const std::vector<int64_t>& strides, int64_t offset) {
  std::vector<TensorInfo> tensors = {call.tensors[x], call.tensors[y]};
  tensors[0].dims = dims;
  tensors[0].strides = strides;
  tensors[0].offset += offset;
  Call inner{call.run, tensors, nullptr, 0};
  View from = open_view(inner, 0, Access::kRead, "x");
  View to = open_view(inner, 1, Access::kWrite, "y");
  if (from.ok && to.ok) copy_view(to, from);
}

void transpose(const Aclop& op, const Call& call) {
  const TensorInfo& x = op.tensors[0];
  std::vector<int64_t> dims;
  std::vector<int64_t> strides;
  for (int64_t axis : constant(op, call, 1)) {
    dims.push_back(x.dims[axis]);
    strides.push_back(x.strides[axis]);
  }
  strided(call, 0, op.output(), dims, strides, 0);
}

void as_strided(const Aclop& op, const Call& call) {
  std::vector<int64_t> offset = constant(op, call, 3);
  strided(call, 0, op.output(), constant(op, call, 1), constant(op, call, 2),
          offset.empty() ? 0 : offset[0]);
}

void slice(const Aclop& op, const Call& call) {
  const TensorInfo& x = op.tensors[0];
  std::vector<int64_t> begin = constant(op, call, 1);
  int64_t offset = 0;
  for (size_t i = 0; i < begin.size(); ++i) offset += begin[i] * x.strides[i];
  strided(call, 0, op.output(), op.tensors[op.output()].dims, x.strides,
          offset);
}

void strided_slice(const Aclop& op, const Call& call) {
  const TensorInfo& x = op.tensors[0];
  std::vector<int64_t> begin = constant(op, call, 1);
  std::vector<int64_t> step = constant(op, call, 3);
  std::vector<int64_t> strides = x.strides;
  int64_t offset = 0;
  for (size_t i = 0; i < begin.size(); ++i) {
    offset += begin[i] * x.strides[i];
    strides[i] *= step[i];
  }
  strided(call, 0, op.output(), op.tensors[op.output()].dims, strides, offset);
}

void broadcast_to(const Aclop& op, const Call& call) {
  View view;
  view.info = op.tensors[0];
  View wide;
  if (!expand(view, op.tensors[op.output()].dims, &wide)) return;
  strided(call, 0, op.output(), wide.info.dims, wide.info.strides, 0);
}

void identity(const Aclop& op, const Call& call) {
  const TensorInfo& x = op.tensors[0];
  strided(call, 0, op.output(), x.dims, x.strides, 0);
}

// dst, its size, stride and offset, then the same of src; writes into dst.
void view_copy(const Aclop& op, const Call& call) {
  std::vector<TensorInfo> tensors = {op.tensors[0], op.tensors[4]};
  for (int i = 0; i < 2; ++i) {
    tensors[i].dims = constant(op, call, 4 * i + 1);
    tensors[i].strides = constant(op, call, 4 * i + 2);
    std::vector<int64_t> offset = constant(op, call, 4 * i + 3);
    tensors[i].offset = offset.empty() ? 0 : offset[0];
  }
  Call inner{call.run, tensors, nullptr, 0};
  View to = open_view(inner, 0, Access::kWrite, "dst");
  View from = open_view(inner, 1, Access::kRead, "src");
  if (from.ok && to.ok) copy_view(to, from);
}

const std::map<std::string, Body>& bodies() {
  static const auto* table = new std::map<std::string, Body>{
      {"Transpose", transpose},
      {"AsStrided", as_strided},
      {"Slice", slice},
      {"StridedSlice", strided_slice},
      {"BroadcastTo", broadcast_to},
      {"Identity", identity},
      {"TensorMove", identity},
      {"ViewCopy", view_copy},
  };
  return *table;
}

TensorInfo dense_info(const AclopTensorDesc& desc,
                      const AclopDataBuffer& data) {
  TensorInfo t;
  t.dims = desc.dims;
  t.strides.assign(desc.dims.size(), 1);
  for (size_t i = desc.dims.size(); i-- > 1;) {
    t.strides[i - 1] = t.strides[i] * t.dims[i];
  }
  t.data_type = desc.data_type;
  t.format = desc.format;
  t.storage_dims = desc.dims;
  t.data = data.data;
  return t;
}

std::vector<int64_t> host_numbers(const AclopTensorDesc& desc,
                                  const AclopDataBuffer& data) {
  if (!data.data || is_device_pointer(data.data)) return {};
  View v;
  v.info = dense_info(desc, data);
  v.base = static_cast<uint8_t*>(data.data);
  return read_integers(v);
}

int execute(const char* name, int inputs,
            const AclopTensorDesc* const* input_descs,
            const AclopDataBuffer* const* input_data, int outputs,
            const AclopTensorDesc* const* output_descs,
            const AclopDataBuffer* const* output_data, void* stream_handle) {
  enter(std::string("aclop:") + name);
  auto body = bodies().find(name);
  if (body == bodies().end()) {
    violation("missing_operator", name,
              "the simulated CANN has no operator of this name (neither "
              "aclnn nor aclop); add it to tests/cann_sim/src");
    set_error(std::string("cann_sim: operator ") + name + " is not simulated");
    return 500002;
  }
  Stream* stream = find_stream(stream_handle, name);
  if (!stream) return kRtStreamContext;
  Aclop op;
  op.inputs = inputs;
  for (int i = 0; i < inputs; ++i) {
    op.tensors.push_back(dense_info(*input_descs[i], *input_data[i]));
    op.constants.push_back(host_numbers(*input_descs[i], *input_data[i]));
  }
  for (int i = 0; i < outputs; ++i) {
    op.tensors.push_back(dense_info(*output_descs[i], *output_data[i]));
  }
  trace(format("\"api\": \"aclop\", \"op\": \"%s\", \"stream\": %d", name,
               stream_number(stream)));
  Body run_body = body->second;
  enqueue(stream, name, [op, run_body](const Run& run) {
    run_body(op, Call{run, op.tensors, nullptr, 0});
  });
  return kOk;
}

}  // namespace

CANN_SIM_EXPORT int aclopCompileAndExecute(
    const char* name, int inputs, const AclopTensorDesc* const* input_descs,
    const AclopDataBuffer* const* input_data, int outputs,
    const AclopTensorDesc* const* output_descs,
    AclopDataBuffer* const* output_data, const void*, int, int, const char*,
    void* stream) {
  CANN_SIM_ENTER(aclopCompileAndExecute);
  return execute(name, inputs, input_descs, input_data, outputs, output_descs,
                 output_data, stream);
}

CANN_SIM_EXPORT int aclopCompileAndExecuteV2(
    const char* name, int inputs, AclopTensorDesc** input_descs,
    AclopDataBuffer** input_data, int outputs, AclopTensorDesc** output_descs,
    AclopDataBuffer** output_data, void*, int, int, const char*, void* stream) {
  CANN_SIM_ENTER(aclopCompileAndExecuteV2);
  return execute(name, inputs, input_descs, input_data, outputs, output_descs,
                 output_data, stream);
}
