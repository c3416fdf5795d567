// pacache_torch._C_npu: what was found on this machine. Loading the library
// registers the NPU kernels.

#include <c10/core/DeviceGuard.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "atb_context.h"
#include "cann_library.h"
#include "capabilities.h"
#include "product.h"
#include "task_queue.h"
#include "warmup.h"

namespace py = pybind11;

namespace {

using namespace pacache::npu;

py::dict capabilities() {
  const Product& here = product();
  py::dict found;
  found["product"] = soc_family(here.soc);
  found["soc"] = here.soc_name;
  found["cann"] = here.cann_text;
  found["verified_on_hardware"] = false;
  found["source"] =
      "read from CANN's sources and documents, not run on hardware";
  py::list rows;
  for (const Capability& row : capability_table()) {
    if (find_capability(here, row.op, row.scenario, row.mode) != &row) {
      continue;
    }
    py::dict entry;
    entry["op"] = row.op;
    if (row.scenario != 0) {
      entry["scenario"] = row.scenario;
    }
    entry["mode"] = row.mode;
    entry["since"] = row.since;
    py::list dtypes;
    for (const at::ScalarType dtype : row.dtypes) {
      dtypes.append(pacache::dtype_name(dtype));
    }
    entry["dtypes"] = dtypes;
    entry["limits"] = row.limits;
    rows.append(entry);
  }
  found["rows"] = rows;
  return found;
}

std::vector<std::pair<std::string, std::string>> paths(
    const std::vector<SearchedLibrary>& libraries) {
  std::vector<std::pair<std::string, std::string>> found;
  for (const SearchedLibrary& library : libraries) {
    found.emplace_back(library.name, library.path);
  }
  return found;
}

py::dict found() {
  py::dict info;
  info["soc"] = product().soc_name;
  info["product"] = soc_family(product().soc);
  info["cann"] = cann_version_text();
  info["atb"] = atb_version_text();
  info["op_api"] = paths(searched_op_api());
  info["atb_libraries"] = paths(searched_atb());
  info["load_backend"] = load_backend() == LoadBackend::kAtb ? "atb" : "aclnn";
  return info;
}

void warmup(int device_index) {
  const c10::Device device(c10::DeviceType::PrivateUse1,
                           static_cast<c10::DeviceIndex>(device_index));
  const py::gil_scoped_release no_gil;
  const c10::DeviceGuard guard(device);
  warm_up_scatter();
  warm_up_load(device);
  synchronize_device();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The NPU kernels of pacache.";
  m.def("capabilities", &capabilities, "What this chip and CANN can do.");
  m.def("found", &found, "Versions and libraries on this machine.");
  m.def("warmup", &warmup, "Resolve functions and make contexts.");
  m.def("release", &release_all, py::call_guard<py::gil_scoped_release>(),
        "Destroy ATB's operations and contexts; at exit only.");
}
