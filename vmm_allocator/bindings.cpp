// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "arena.h"
#include "driver.h"
#include "errors.h"
#include "segment_pool.h"

namespace py = pybind11;

namespace {

using vmm_allocator::Arena;
using vmm_allocator::SegmentPool;
using vmm_allocator::Statistics;
using vmm_allocator::View;

// Raises an exception of vmm_allocator._errors. These exist without the compiled module too.
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
    raise("OutOfMemoryError", error.what(), error.requested_bytes, error.held_bytes,
          error.free_bytes);
  } catch (const vmm_allocator::LimitExceeded& error) {
    raise("LimitError", error.what(), error.requested_bytes, error.held_bytes, error.limit_bytes);
  } catch (const vmm_allocator::ReservationExceeded& error) {
    raise("ReservationError", error.what(), error.requested_bytes, error.reserved_bytes);
  } catch (const vmm_allocator::InUse& error) {
    raise("InUseError", error.what(), error.first_bytes, error.end_bytes);
  } catch (const vmm_allocator::ArenaClosed& error) {
    raise("ClosedArenaError", error.what());
  } catch (const vmm_allocator::ArenaForked& error) {
    raise("ForkedArenaError", error.what());
  } catch (const vmm_allocator::HooksExhausted& error) {
    raise("VmmError", error.what());
  }
}

void bind_arena(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Statistics>(module, "Statistics")
      .def_readonly("reserved_bytes", &Statistics::reserved_bytes)
      .def_readonly("chunk_bytes", &Statistics::chunk_bytes)
      .def_readonly("granularity_bytes", &Statistics::granularity_bytes)
      .def_readonly("front_bytes", &Statistics::front_bytes)
      .def_readonly("mapped_bytes", &Statistics::mapped_bytes)
      .def_readonly("spare_bytes", &Statistics::spare_bytes)
      .def_readonly("in_use_bytes", &Statistics::in_use_bytes)
      .def_readonly("num_chunks_mapped", &Statistics::num_chunks_mapped)
      .def_readonly("num_chunks_created", &Statistics::num_chunks_created)
      .def_readonly("num_chunks_released", &Statistics::num_chunks_released)
      .def_readonly("create_seconds", &Statistics::create_seconds)
      .def_readonly("map_seconds", &Statistics::map_seconds)
      .def_readonly("access_seconds", &Statistics::access_seconds)
      .def_readonly("unmap_seconds", &Statistics::unmap_seconds)
      .def_readonly("release_seconds", &Statistics::release_seconds)
      .def_readonly("wait_seconds", &Statistics::wait_seconds);
  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      .def(py::init<int, size_t, size_t, size_t>(), py::arg("device"), py::arg("reserve_bytes"),
           py::arg("chunk_bytes"), py::arg("limit_bytes"), release)
      .def("grow", &Arena::grow, py::arg("num_bytes"), release)
      .def("shrink", &Arena::shrink, py::arg("num_bytes"), py::arg("keep"), release)
      .def("trim", &Arena::trim, py::arg("num_bytes"), release)
      .def("close", &Arena::close, release)
      .def("statistics", &Arena::statistics, release)
      .def_property_readonly("base", &Arena::base);
  py::class_<View>(module, "View")
      .def(py::init<std::shared_ptr<Arena>, size_t, size_t>(), py::arg("arena").none(false),
           py::arg("offset"), py::arg("num_bytes"), release);
}

void bind_segment_pool(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<SegmentPool, std::shared_ptr<SegmentPool>>(module, "SegmentPool")
      .def(py::init<std::shared_ptr<Arena>, size_t>(), py::arg("arena").none(false),
           py::arg("reserve_bytes"), release)
      .def("close", &SegmentPool::close, release)
      .def_property_readonly("in_use_bytes", &SegmentPool::in_use_bytes);
  module.def("attach_hooks", &vmm_allocator::attach_hooks, py::arg("pool").none(false), release);
}

}  // namespace

PYBIND11_MODULE(_vmm_allocator, module) {
  py::register_local_exception_translator(&translate);
  bind_arena(module);
  bind_segment_pool(module);
  module.attr("BUILD_STAMP") = int64_t{BUILD_STAMP};  // defined by setup.py
}
