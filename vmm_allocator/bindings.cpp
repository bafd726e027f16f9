// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "arena.h"
#include "driver.h"

namespace py = pybind11;

namespace {

// Raises an exception of vmm_allocator._errors, which exists without the compiled module too.
template <typename... Arguments>
void raise(const char* type_name, Arguments&&... arguments) {
  const py::object type = py::module_::import("vmm_allocator._errors").attr(type_name);
  const py::object error = type(std::forward<Arguments>(arguments)...);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(std::exception_ptr pointer) {
  if (!pointer) return;
  try {
    std::rethrow_exception(pointer);
  } catch (const vmm_allocator::DriverUnavailable& error) {
    raise("DriverUnavailableError", error.what());
  } catch (const vmm_allocator::DriverError& error) {
    raise("DriverError", error.what(), static_cast<int>(error.result));
  } catch (const vmm_allocator::OutOfMemory& error) {
    raise("OutOfMemoryError", error.what(), error.requested_bytes, error.mapped_bytes,
          error.free_bytes);
  } catch (const vmm_allocator::ReservationExceeded& error) {
    raise("ReservationError", error.what(), error.requested_bytes, error.reserved_bytes);
  } catch (const vmm_allocator::ArenaClosed& error) {
    raise("ClosedArenaError", error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_vmm_allocator, module) {
  using vmm_allocator::Arena;
  using vmm_allocator::Statistics;
  py::register_local_exception_translator(&translate);
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Statistics>(module, "Statistics")
      .def_readonly("reserved_bytes", &Statistics::reserved_bytes)
      .def_readonly("mapped_bytes", &Statistics::mapped_bytes)
      .def_readonly("peak_mapped_bytes", &Statistics::peak_mapped_bytes)
      .def_readonly("chunk_bytes", &Statistics::chunk_bytes)
      .def_readonly("granularity_bytes", &Statistics::granularity_bytes)
      .def_readonly("num_grows", &Statistics::num_grows)
      .def_readonly("num_shrinks", &Statistics::num_shrinks);
  py::class_<Arena>(module, "Arena")
      .def(py::init<int, size_t, size_t>(), py::arg("device"), py::arg("reserve_bytes"),
           py::arg("chunk_bytes"), release)
      .def("grow", &Arena::grow, py::arg("num_bytes"), release)
      .def("shrink", &Arena::shrink, py::arg("num_bytes"), release)
      .def("close", &Arena::close, release)
      .def("statistics", &Arena::statistics, release)
      .def_property_readonly("base", &Arena::base);
}
