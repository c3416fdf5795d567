// Runs an AOTInductor package that holds the operators of pacache, with no
// Python code: the program of a C++ server in small.
//
//   run_package <_C library> <package> <tensors> <results>
//
// <tensors> holds the inputs of one call after the other, each call a list of
// tensors in torch.save's format; what the calls return is saved likewise.
// The library is a Python extension module, so the program links libpython and
// libtorch_python, which the library needs; the interpreter is never started.

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

c10::IValue read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes);
}

void write(const std::string& path, const c10::IValue& value) {
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  std::ofstream(path, std::ios::binary).write(bytes.data(), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "run_package <_C library> <package> <tensors> <results>\n";
    return 2;
  }
  // Registers the operators.
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  c10::List<c10::IValue> results(c10::AnyType::get());
  const c10::IValue calls = read(argv[3]);
  for (const c10::IValue& call : calls.toListRef()) {
    std::vector<at::Tensor> inputs;
    for (const c10::IValue& input : call.toListRef()) {
      inputs.push_back(input.toTensor());
    }
    results.push_back(c10::IValue(model.run(inputs)));
  }
  write(argv[4], results);
  return 0;
}
