// The Python module `noria.ops._native`: two executors with one interface, and what this machine can do.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "executor.h"
#include "machine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace noria {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<nb::numpy, const float, nb::ndim<2>>;

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

template <typename T>
Logits forward(Executor<T>& self, Ints token_ids, Ints positions, Ints slots, Ints query_start, Ints context_len,
               IntTable block_table, Ints logit_tokens) {
  Batch batch;
  batch.num_tokens = int(token_ids.size());
  batch.num_rows = int(context_len.size());
  batch.num_logits = int(logit_tokens.size());
  batch.table_width = int(block_table.shape(1));
  check(positions.size() == token_ids.size() && slots.size() == token_ids.size(), "one position and slot for each token");
  check(query_start.size() == context_len.size() + 1 && block_table.shape(0) == context_len.size(), "one entry per row");
  batch.token_ids = token_ids.data();
  batch.positions = positions.data();
  batch.slots = slots.data();
  batch.query_start = query_start.data();
  batch.context_len = context_len.data();
  batch.block_table = block_table.data();
  batch.logit_tokens = logit_tokens.data();
  self.check(batch);
  const float* result;
  {
    nb::gil_scoped_release released;
    result = self.run(batch);
  }
  return Logits(result, {size_t(batch.num_logits), size_t(self.result_width())}, nb::find(self));
}

template <typename T>
void bind(nb::module_& m, const char* name, GemmKernel<T> (*kernel)(bool)) {
  using E = Executor<T>;
  nb::class_<E>(m, name)
      .def("__init__", [kernel](E* self, int threads, bool use_amx) { new (self) E(threads, kernel(use_amx)); },
           "threads"_a, "use_amx"_a)
      .def("begin_matrix", &E::begin_matrix, "outputs"_a, "inputs"_a, "interleave"_a)
      .def("fill_matrix", [](E& self, int matrix, int first_row, Floats data) {
             check(int(data.shape(1)) == self.matrix_inputs(matrix), "a matrix row has as many numbers as inputs");
             nb::gil_scoped_release released;
             self.fill_matrix(matrix, first_row, int(data.shape(0)), data.data());
           })
      .def("fill_matrix", [](E& self, int matrix, int first_row, Halves data) {
             check(int(data.shape(1)) == self.matrix_inputs(matrix), "a matrix row has as many numbers as inputs");
             nb::gil_scoped_release released;
             self.fill_matrix(matrix, first_row, int(data.shape(0)), data.data());
           })
      .def("set_bias", &E::set_bias)
      .def("add_vector", &E::add_vector)
      .def("add_rows", &E::add_rows, "width"_a)
      .def("add_slabs", &E::add_slabs, "width"_a)
      .def("add_attention", [](E& self, int num_heads, int num_kv_heads, int head_dim, float scale) {
             return self.add_attention({num_heads, num_kv_heads, head_dim, scale});
           })
      .def("add_operation", [](E& self, const std::string& kind, int input, int table, int output, int weight,
                               int layer, int attention, float number, const std::string& epilogue, bool selects,
                               bool on_logit_rows, const std::string& label) {
             Operation op;
             op.kind = kind_of(kind);
             op.input = input;
             op.table = table;
             op.output = output;
             op.weight = weight;
             op.layer = layer;
             op.attention = attention;
             op.number = number;
             op.epilogue = epilogue_of(epilogue);
             op.selects = selects;
             op.on_logit_rows = on_logit_rows;
             op.label = label;
             self.add_operation(std::move(op));
           },
           "kind"_a, "input"_a = -1, "table"_a = -1, "output"_a = -1, "weight"_a = -1, "layer"_a = -1,
           "attention"_a = -1, "number"_a = 0.0f, "epilogue"_a = "store", "selects"_a = false,
           "on_logit_rows"_a = false, "label"_a = "")
      .def("allocate_kv", &E::allocate_kv, "num_layers"_a, "num_blocks"_a, "block_size"_a, "attention"_a)
      .def("forward", &forward<T>)
      .def_prop_ro("weight_bytes", &E::weight_bytes)
      .def_prop_ro("kernel", [](E& self) { return std::string(self.kernel_name()); })
      .def_prop_ro("threads", &E::num_threads)
      .def_rw("timed", &E::timed)
      .def_ro("seconds", &E::seconds);
}

// Measurements take a while and need no Python.
template <typename Measure>
double measured(Measure measure) {
  nb::gil_scoped_release released;
  return measure();
}

void bind_machine(nb::module_& m) {
  const auto threads_at_least_one = [](int threads) { check(threads >= 1, "threads must be at least 1"); };
  m.def("read_bandwidth", [=](int threads, size_t num_bytes) {
          threads_at_least_one(threads);
          return measured([=] { return read_bandwidth(threads, num_bytes); });
        },
        "threads"_a, "num_bytes"_a);
  m.def("round_trip_seconds", [] { return measured(round_trip_seconds); });
  m.def("bfloat16_kernel_flops", [=](int threads) {
          threads_at_least_one(threads);
          return measured([=] {
            return kernel_flops(threads, bf16_kernel(cpu_has_amx_bf16() ? Isa::kAmx : Isa::kAvx512));
          });
        },
        "threads"_a);
  m.def("float32_kernel_flops", [=](int threads) {
          threads_at_least_one(threads);
          return measured([=] { return kernel_flops(threads, float_kernel()); });
        },
        "threads"_a);
  m.def("bfloat16_register_flops", [=](int threads) {
          threads_at_least_one(threads);
          return measured([=] { return register_flops<bf16>(threads); });
        },
        "threads"_a);
  m.def("float32_register_flops", [=](int threads) {
          threads_at_least_one(threads);
          return measured([=] { return register_flops<float>(threads); });
        },
        "threads"_a);
}

}  // namespace
}  // namespace noria

NB_MODULE(_native, m) {
  using namespace noria;
  m.def("has_avx512_bf16", &cpu_has_avx512_bf16);
  m.def("has_amx_bf16", &cpu_has_amx_bf16);
  bind_machine(m);
  bind<bf16>(m, "ExecutorBF16", [](bool use_amx) { return bf16_kernel(use_amx ? Isa::kAmx : Isa::kAvx512); });
  bind<float>(m, "ExecutorF32", [](bool) { return float_kernel(); });
}
