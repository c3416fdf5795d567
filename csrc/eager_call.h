// How does an eager Python program call the operators at the least cost?

#pragma once

#include <Python.h>

namespace pacache {

// Adds the functions of eager_call.cpp to the module. Throws
// pybind11::error_already_set.
void add_eager_calls(PyObject* module);

}  // namespace pacache
