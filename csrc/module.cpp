// The Python module `noria.ops._native`: two executors with one interface, and what this machine can do.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "executor.h"
#include "machine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace noria {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatList = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using EncodedTable = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using Logits = nb::ndarray<nb::numpy, const float, nb::ndim<2>>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Records = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// For results: the caller's memory.
template <typename T, size_t N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

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
  check(batch.num_rows > 0 && block_table.shape(0) % context_len.size() == 0, "one table per row in each group");
  batch.num_groups = int(block_table.shape(0) / context_len.size());
  check(positions.size() == token_ids.size(), "one position for each token");
  check(slots.size() == token_ids.size() * batch.num_groups, "one slot for each token in each group");
  check(query_start.size() == context_len.size() + 1, "one entry per row");
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
  auto* memory = new std::shared_ptr<const void>(self.result_memory());
  const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<std::shared_ptr<const void>*>(p); });
  return Logits(result, {size_t(batch.num_logits), size_t(self.result_width())}, owner);
}

template <typename T>
void sample(Executor<T>& self, Floats logits, Records params, IntTable token_ids, Longs table_rows, Ints num_tokens,
            Ints num_prompt_tokens, Out<int32_t, 1> chosen, Out<double, 1> logprobs, Out<int32_t, 1> ranks,
            Out<int32_t, 2> top_ids, Out<double, 2> top_logprobs, std::optional<Words> masks, std::optional<Ints> mask_of_row,
            std::optional<Ints> bias_start, std::optional<Ints> bias_ids, std::optional<FloatList> biases,
            bool chosen_is_given) {
  const size_t num_rows = logits.shape(0);
  check(params.shape(0) == num_rows && table_rows.size() == num_rows && num_tokens.size() == num_rows &&
            num_prompt_tokens.size() == num_rows && chosen.size() == num_rows && logprobs.size() == num_rows &&
            ranks.size() == num_rows && top_ids.shape(0) == num_rows && top_logprobs.shape(0) == num_rows &&
            (!mask_of_row || mask_of_row->size() == num_rows),
        "one entry for each row of logits");
  check(top_ids.shape(1) == top_logprobs.shape(1), "as many probable tokens as probabilities of theirs");
  check(params.shape(1) == sizeof(RowParams), "a row's parameters have another size here");
  SamplingRows rows;
  rows.num_rows = int(num_rows);
  rows.vocabulary = int(logits.shape(1));
  rows.logits = logits.data();
  rows.params = reinterpret_cast<const RowParams*>(params.data());
  rows.table_height = int(token_ids.shape(0));
  rows.table_width = int(token_ids.shape(1));
  rows.token_ids = token_ids.data();
  rows.table_rows = table_rows.data();
  rows.num_tokens = num_tokens.data();
  rows.num_prompt_tokens = num_prompt_tokens.data();
  rows.chosen = chosen.data();
  rows.max_top = int(top_ids.shape(1));
  rows.logprobs = logprobs.data();
  rows.ranks = ranks.data();
  rows.top_ids = top_ids.data();
  rows.top_logprobs = top_logprobs.data();
  if (mask_of_row) {
    check(masks && masks->shape(1) == size_t(rows.mask_words()), "a mask has one bit for each token");
    rows.num_masks = int(masks->shape(0));
    rows.masks = masks->data();
    rows.mask_of_row = mask_of_row->data();
  }
  if (bias_start) {
    check(bias_start->size() == num_rows + 1 && bias_ids && biases && bias_ids->size() == biases->size(),
          "biases begin and end for each row, and each has a token");
    rows.num_biases = int(biases->size());
    rows.bias_start = bias_start->data();
    rows.bias_ids = bias_ids->data();
    rows.biases = biases->data();
  }
  rows.chosen_is_given = chosen_is_given;
  rows.check();
  nb::gil_scoped_release released;
  self.sample(rows);
}

template <typename T>
void fill_matrix(Executor<T>& self, int matrix, int first_row, EncodedTable rows, const std::string& encoding_name,
                 int interleaved_heads, int begin, int end) {
  const Encoding& encoding = encoding_of(encoding_name);
  const int inputs = self.matrix_inputs(matrix), num_rows = int(rows.shape(0));
  check(inputs % encoding.block_values == 0 && rows.shape(1) == encoding.row_bytes(inputs),
        "a matrix row has as many numbers as inputs");
  check(interleaved_heads >= 0 && (interleaved_heads == 0 || num_rows % (2 * interleaved_heads) == 0),
        "rows make whole heads of pairs");
  nb::gil_scoped_release released;
  self.fill_matrix(matrix, first_row, {rows.data(), encoding, num_rows, interleaved_heads}, begin, end);
}

// Rows of whole blocks into float32.
Values decode(EncodedTable rows, const std::string& encoding_name) {
  const Encoding& encoding = encoding_of(encoding_name);
  check(rows.shape(1) % encoding.block_bytes == 0, "a row has whole blocks");
  const size_t num_rows = rows.shape(0), num_blocks = rows.shape(1) / encoding.block_bytes;
  const size_t width = num_blocks * encoding.block_values;
  float* values = new float[num_rows * width];
  const nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  encoding.decode(rows.data(), num_rows * num_blocks, values);
  return Values(values, {num_rows, width}, owner);
}

std::vector<std::string> encoding_names() {
  std::vector<std::string> names;
  for (const Encoding& encoding : encodings()) names.emplace_back(encoding.name);
  return names;
}

template <typename T>
void bind(nb::module_& m, const char* name, GemmKernel<T> (*kernel)(bool)) {
  using E = Executor<T>;
  nb::class_<E>(m, name)
      .def("__init__", [kernel](E* self, int threads, bool use_amx) {
             check(threads >= 1, "an executor has at least one thread");
             new (self) E(threads, kernel(use_amx));
           },
           "threads"_a, "use_amx"_a)
      .def("begin_matrix", &E::begin_matrix, "outputs"_a, "inputs"_a, "interleave"_a)
      .def("fill_matrix", &fill_matrix<T>, "matrix"_a, "first_row"_a, "rows"_a, "encoding"_a, "interleaved_heads"_a,
           "begin"_a, "end"_a)
      .def("set_bias", &E::set_bias)
      .def("add_vector", &E::add_vector)
      .def("set_vector", &E::set_vector)
      .def("add_rows", &E::add_rows, "width"_a)
      .def("add_slabs", &E::add_slabs, "width"_a)
      .def("add_attention", [](E& self, int num_heads, int num_kv_heads, int head_dim, float scale,
                               std::optional<int> window, std::optional<float> soft_cap, std::optional<int> rotary_dim) {
             AttentionShape shape{num_heads, num_kv_heads, head_dim, scale};
             shape.window = std::min(window.value_or(kNoWindow), kNoWindow);
             shape.soft_cap = soft_cap.value_or(shape.soft_cap);
             shape.rotary_dim = rotary_dim.value_or(head_dim);
             return self.add_attention(shape);
           },
           "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a = nb::none(), "soft_cap"_a = nb::none(),
           "rotary_dim"_a = nb::none())
      .def("add_operation", [](E& self, const std::string& kind, int input, int table, int output, int weight,
                               int layer, int attention, int q_norm, int k_norm, float epsilon, float factor,
                               float soft_cap, const std::string& epilogue, bool selects, bool on_logit_rows,
                               const std::string& label) {
             Operation op;
             op.kind = kind_of(kind);
             op.input = input;
             op.table = table;
             op.output = output;
             op.weight = weight;
             op.layer = layer;
             op.attention = attention;
             op.q_norm = q_norm;
             op.k_norm = k_norm;
             op.epsilon = epsilon;
             op.factor = factor;
             op.soft_cap = soft_cap;
             op.epilogue = epilogue_of(epilogue);
             op.selects = selects;
             op.on_logit_rows = on_logit_rows;
             op.label = label;
             self.add_operation(std::move(op));
           },
           "kind"_a, "input"_a = -1, "table"_a = -1, "output"_a = -1, "weight"_a = -1, "layer"_a = -1,
           "attention"_a = -1, "q_norm"_a = -1, "k_norm"_a = -1, "epsilon"_a = 0.0f, "factor"_a = 1.0f,
           "soft_cap"_a = 0.0f, "epilogue"_a = "store", "selects"_a = false, "on_logit_rows"_a = false, "label"_a = "")
      .def("place_layers", &E::place_layers, "group_of"_a, "array_of"_a, "windows"_a)
      .def("allocate_kv", &E::allocate_kv, "num_arrays"_a, "num_blocks"_a, "block_size"_a, "attention"_a)
      .def("touch_kv", &E::touch_kv, nb::call_guard<nb::gil_scoped_release>())
      .def("forward", &forward<T>)
      .def("sample", &sample<T>, "logits"_a, "params"_a, "token_ids"_a, "table_rows"_a, "num_tokens"_a,
           "num_prompt_tokens"_a, "chosen"_a.noconvert(), "logprobs"_a.noconvert(), "ranks"_a.noconvert(),
           "top_ids"_a.noconvert(), "top_logprobs"_a.noconvert(), "masks"_a = nb::none(), "mask_of_row"_a = nb::none(),
           "bias_start"_a = nb::none(), "bias_ids"_a = nb::none(), "biases"_a = nb::none(), "chosen_is_given"_a = false)
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
  m.attr("interface") = 1;  // noria.ops.native.INTERFACE: counted up whenever one of them wants something new of the other
  m.def("has_avx512_bf16", &cpu_has_avx512_bf16);
  m.def("has_amx_bf16", &cpu_has_amx_bf16);
  m.def("encodings", &encoding_names);
  m.def("decode", &decode, "rows"_a, "encoding"_a);
  bind_machine(m);
  bind<bf16>(m, "ExecutorBF16", [](bool use_amx) { return bf16_kernel(use_amx ? Isa::kAmx : Isa::kAvx512); });
  bind<float>(m, "ExecutorF32", [](bool) { return float_kernel(); });
}
