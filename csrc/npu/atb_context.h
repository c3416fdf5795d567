// ATB's context and operation: what they are, who owns them.
//
// A context belongs to one device and, because setting its stream is not
// locked, to one thread here. An operation remembers its tensors and its first
// flags, so there is one per thread and set of flags. Both are made by the
// thread that uses them (the task queue's, usually), kept for the process and
// destroyed by release_all() at exit.

#pragma once

#include <cstdint>

struct aclTensor;

namespace atb {

// The part of ATB's class that is called: its first virtual function behind
// the destructor sets the stream. Objects are only ever made by ATB.
class Context {
 public:
  virtual ~Context() = default;
  virtual int32_t SetExecuteStream(void* stream) = 0;
};

class Operation;

}  // namespace atb

namespace pacache::npu {

using AtbPhaseOne = int32_t (*)(
    const aclTensor* key_cache, const aclTensor* value_cache,
    const aclTensor* block_tables, const aclTensor* context_lens,
    const aclTensor* key, const aclTensor* value, const aclTensor* seq_starts,
    int8_t kv_cache_cfg, bool is_seq_lens_cumsum_type, bool has_seq_starts,
    uint64_t* workspace_size, atb::Operation** operation,
    atb::Context* context);
using AtbPhaseTwo = int32_t (*)(void* workspace, uint64_t workspace_size,
                                atb::Operation* operation,
                                atb::Context* context);

// The functions of libatb that are needed, looked up once. RuntimeError, in the
// name of an operator of ours, when one is missing.
struct AtbFunctions {
  AtbPhaseOne phase_one;
  AtbPhaseTwo phase_two;
  int32_t (*create_context)(atb::Context**);
  int32_t (*destroy_context)(atb::Context*);
  int32_t (*destroy_operation)(atb::Operation*);
};
const AtbFunctions& atb_functions(const char* op);

// Is libatb there with what is needed?
bool atb_available();

// The calling thread's context for a device, made at the first use and
// destroyed when the thread ends; the device must be the current one.
// RuntimeError when ATB gives none.
atb::Context* atb_context(const char* op, int device);

// The calling thread's operation for a device and these flags, null at first
// and after a failure; the caller hands the address to phase one.
atb::Operation** atb_operation(int device, int8_t kv_cache_cfg, bool cumsum);

// Destroys an operation whose phase one or two failed: its state is unknown.
void drop_operation(atb::Operation** operation);

// Destroys everything, with the devices idle; nothing may be used after.
void release_all();

}  // namespace pacache::npu
