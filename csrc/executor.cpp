#include "executor.h"

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <stdexcept>

#include "numbers.h"

namespace noria {

namespace {

constexpr int kQueriesPerItem = 16;
constexpr int kRowsPerTurn = 4;
// Of a product's input, what a core keeps in its second cache while it goes through the weights.
int chunk_bytes() {
  static const long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return int(std::clamp(cache, 1L << 20, 4L << 20) / 5 * 2);
}

}  // namespace

Kind kind_of(const std::string& name) {
  static const std::pair<const char*, Kind> kinds[] = {
      {"embedding", Kind::kEmbedding},       {"norm", Kind::kNorm},     {"norm_add", Kind::kNormAdd},
      {"product", Kind::kProduct},           {"rotary", Kind::kRotary}, {"attention", Kind::kAttention},
      {"rotary_table", Kind::kRotaryTable}};
  for (const auto& [known, kind] : kinds)
    if (name == known) return kind;
  throw std::invalid_argument("no operation is called " + name);
}

Epilogue epilogue_of(const std::string& name) {
  if (name == "store") return Epilogue::kStore;
  if (name == "add") return Epilogue::kAdd;
  if (name == "silu_mul") return Epilogue::kSiluMul;
  if (name == "gelu_mul") return Epilogue::kGeluMul;
  throw std::invalid_argument("no epilogue is called " + name);
}

template <typename T>
Executor<T>::Executor(int num_threads, GemmKernel<T> kernel) : kernel_(kernel), shares_(num_threads), pool_(num_threads) {
  for (int thread = 0; thread < num_threads; ++thread) scratch_.emplace_back();
}

// --- weights ---

template <typename T>
int Executor<T>::begin_matrix(int outputs, int inputs, bool interleave) {
  auto matrix = std::make_unique<Matrix>();
  matrix->outputs = outputs;
  matrix->inputs = inputs;
  matrix->interleave = interleave;
  matrix->panels = interleave ? (outputs / 2 + 15) / 16 : (outputs + kPanel - 1) / kPanel;
  matrix->num_slabs = (inputs + kSlab - 1) / kSlab;
  matrix->data = weights_.take(size_t(matrix->panels) * kPanel * matrix->num_slabs * kSlab);
  matrices_.push_back(std::move(matrix));
  return int(matrices_.size()) - 1;
}

// Where output `row` stands among the packed ones. Interleaved: each panel has 16 of the first half of the outputs,
// then the 16 of the second half that belong to them.
template <typename T>
int Executor<T>::packed_row(const Matrix& matrix, int row) const {
  if (!matrix.interleave) return row;
  const int half = matrix.outputs / 2, within = row % half;
  return within / 16 * kPanel + within % 16 + (row < half ? 0 : 16);
}

template <typename T>
void Executor<T>::fill_matrix(int index, int first_row, const EncodedRows& source, int begin, int end) {
  Matrix& matrix = *matrices_.at(index);
  if (begin < 0 || begin > end || end > source.num_rows || first_row < 0 || first_row + end > matrix.outputs)
    throw std::out_of_range("matrix rows");
  const Encoding& encoding = source.encoding;
  const size_t row_bytes = encoding.row_bytes(matrix.inputs), num_blocks = matrix.inputs / encoding.block_values;
  for (Array<float>& array : scratch_) array.reserve(size_t(kPanel) * matrix.inputs);
  shares_.clear();
  pool_.run([&](int thread) {
    float* values = scratch_[thread].data();
    shares_.run(thread, 0, end - begin, kPanel, [&](int from, int to) {
      for (int i = from; i < to; ++i) {
        const uint8_t* blocks = source.data + source.place_in_file(begin + i) * row_bytes;
        encoding.decode(blocks, num_blocks, values + size_t(i - from) * matrix.inputs);
      }
      pack_rows(matrix, first_row + begin + from, to - from, values);
    });
  });
}

// Tile by tile, because neighbours of a row stand far apart in a panel.
template <typename T>
void Executor<T>::pack_rows(Matrix& matrix, int first_row, int num_rows, const float* values) {
  constexpr int kTile = 64;
  for (int begin = 0; begin < matrix.inputs; begin += kTile) {
    const int end = std::min(begin + kTile, matrix.inputs);
    for (int i = 0; i < num_rows; ++i) {
      const int row = packed_row(matrix, first_row + i);
      const float* from = values + size_t(i) * matrix.inputs;
      for (int k = begin; k < end; ++k) matrix.data.data()[packed_index(matrix, row, k)] = from_float<T>(from[k]);
    }
  }
}

template <typename T>
void Executor<T>::set_bias(int index, std::vector<float> bias) {
  Matrix& matrix = *matrices_.at(index);
  if (int(bias.size()) != matrix.outputs) throw std::invalid_argument("a bias has as many numbers as outputs");
  matrix.bias.assign(size_t(matrix.panels) * kPanel, 0.0f);
  for (int row = 0; row < matrix.outputs; ++row) matrix.bias[packed_row(matrix, row)] = bias[row];
}

template <typename T>
int Executor<T>::add_vector(std::vector<float> values) {
  vectors_.push_back(std::move(values));
  return int(vectors_.size()) - 1;
}

template <typename T>
void Executor<T>::set_vector(int index, std::vector<float> values) {
  std::vector<float>& vector = vectors_.at(index);
  if (values.size() != vector.size()) throw std::invalid_argument("a vector keeps its length");
  vector = std::move(values);
}

template <typename T>
int Executor<T>::add_rows(int width) {
  rows_.push_back(Rows{width});
  return int(rows_.size()) - 1;
}

template <typename T>
int Executor<T>::add_slabs(int width) {
  slabs_.push_back({width, {}});
  return int(slabs_.size()) - 1;
}

template <typename T>
int Executor<T>::add_attention(AttentionShape shape) {
  const auto heads = [](const AttentionShape& s) { return std::array{s.num_heads, s.num_kv_heads, s.head_dim}; };
  if (!shapes_.empty() && heads(shapes_[0]) != heads(shape))
    throw std::invalid_argument("all layers attend with as many heads of one size");
  if (shape.window < 1) throw std::invalid_argument("a window has one key at least");
  if (shape.rotary_dim % 2 || shape.rotary_dim > shape.head_dim)
    throw std::invalid_argument("dimensions are rotated in pairs, at most those of a head");
  if (shape.head_dim % 16 || shape.head_dim > kMaxHeadDim) throw std::invalid_argument("head_dim must be a multiple of 16, at most 256");
  if (shape.num_heads % shape.num_kv_heads) throw std::invalid_argument("heads must share key/value heads evenly");
  shapes_.push_back(shape);
  return int(shapes_.size()) - 1;
}

template <typename T>
void Executor<T>::add_operation(Operation operation) {
  operations_.push_back(std::move(operation));
}

template <typename T>
void Executor<T>::place_layers(const std::vector<int>& group_of, const std::vector<int>& array_of,
                               std::vector<int> windows) {
  if (int(group_of.size()) != num_layers() || group_of.size() != array_of.size())
    throw std::invalid_argument("each layer has one place");
  places_.clear();
  for (size_t layer = 0; layer < group_of.size(); ++layer) {
    const Place place{group_of[layer], array_of[layer]};
    if (place.group < 0 || place.group >= int(windows.size()) || place.array < 0)
      throw std::invalid_argument("a layer is in a group that is not there");
    places_.push_back(place);
  }
  windows_ = std::move(windows);
  pools_.clear();
}

template <typename T>
void Executor<T>::allocate_kv(int num_arrays, int num_blocks, int block_size, int attention) {
  if (block_size % kGroup) throw std::invalid_argument("block_size must be a multiple of 16");
  for (const Place& place : places_)
    if (place.array >= num_arrays) throw std::invalid_argument("a layer has no array in the pool");
  pools_.clear();
  const size_t size = size_t(num_blocks + 1) * (block_size / kGroup) * shapes_.at(attention).group_elements();
  for (int array = 0; array < num_arrays; ++array) pools_.emplace_back(size);
  block_size_ = block_size;
  num_blocks_ = num_blocks;
}

template <typename T>
void Executor<T>::touch_kv() {
  constexpr size_t kPageBytes = 4096;
  shares_.clear();
  pool_.run([this](int thread) {
    shares_.run(thread, 0, int(pools_.size()), 1, [&](int array, int) {
      volatile T* pool = pools_[array].data();
      for (size_t i = 0; i < pools_[array].size(); i += kPageBytes / sizeof(T)) pool[i] = T(0);
    });
  });
}

template <typename T>
size_t Executor<T>::weight_bytes() const {
  size_t total = 0;
  for (const auto& matrix : matrices_) total += matrix->data.size() * sizeof(T) + matrix->bias.size() * sizeof(float);
  for (const auto& vector : vectors_) total += vector.size() * sizeof(float);
  return total;
}

template <typename T>
int Executor<T>::num_layers() const {
  int most = -1;
  for (const Operation& op : operations_) most = std::max(most, op.layer);
  return most + 1;
}

template <typename T>
int Executor<T>::result_width() const {
  return rows_.at(operations_.back().output).width;
}

// --- a step ---

template <typename T>
void Executor<T>::check(const Batch& batch) const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
  };
  int vocabulary = 0;
  for (const Operation& op : operations_)
    if (op.kind == Kind::kEmbedding) vocabulary = matrices_[op.weight]->outputs;
  const int64_t num_slots = int64_t(num_blocks_ + 1) * block_size_;
  require(batch.num_tokens > 0 && batch.query_start[0] == 0, "a batch has tokens, and its rows begin at 0");
  require(batch.query_start[batch.num_rows] == batch.num_tokens, "rows and tokens do not add up");
  require(batch.num_groups == int(windows_.size()), "a batch has blocks for each group of layers");
  for (int i = 0; i < batch.num_tokens; ++i)
    require(batch.token_ids[i] >= 0 && batch.token_ids[i] < vocabulary, "a token id is outside the vocabulary");
  for (int64_t i = 0; i < int64_t(batch.num_tokens) * batch.num_groups; ++i)
    require(batch.slots[i] >= block_size_ && batch.slots[i] < num_slots, "a slot is outside the KV pool");
  for (int i = 0; i < batch.num_logits; ++i)
    require(batch.logit_tokens[i] >= 0 && batch.logit_tokens[i] < batch.num_tokens, "a logit row is outside the batch");
  for (int row = 0; row < batch.num_rows; ++row) {
    const int begin = batch.query_start[row], end = batch.query_start[row + 1], length = batch.context_len[row];
    require(begin < end && end <= batch.num_tokens && end - begin <= length, "a row has no tokens, or more than its context");
    require(length <= int64_t(batch.table_width) * block_size_, "a row has more context than blocks");
    const int num_blocks = int((int64_t(length) + block_size_ - 1) / block_size_);
    for (int i = begin; i < end; ++i) require(batch.positions[i] == length - (end - i), "positions must follow");
    for (int group = 0; group < batch.num_groups; ++group) {
      const int window = windows_[group], first_key = window == 0 ? 0 : std::max(0, length - (end - begin) - window + 1);
      for (int i = first_key / block_size_; i < num_blocks; ++i) {
        const int block = batch.table(group, row)[i];
        require(block >= 1 && block <= num_blocks_, "a block is outside the KV pool");
      }
    }
  }
}

template <typename T>
const float* Executor<T>::run(const Batch& batch) {
  prepare(batch);
  pool_.run([this](int thread) { work(thread); });
  return rows_[operations_.back().output].data();
}

template <typename T>
void Executor<T>::prepare(const Batch& batch) {
  batch_ = &batch;
  const int most_rows = padded_rows(std::max({batch.num_tokens, batch.num_logits, 1}));
  for (Rows& rows : rows_) rows.reserve(size_t(most_rows) * padded(rows.width));
  for (Slabs& slabs : slabs_) slabs.data.reserve(size_t(most_rows) * padded(slabs.width));
  shares_.clear();
  seconds.assign(timed ? operations_.size() : 0, 0.0);
  size_t scratch = (size_t(most_rows) + 2 * kernel_.max_rows) * kPanel;
  for (const AttentionShape& shape : shapes_) scratch = std::max(scratch, attention_scratch_floats(shape, kQueriesPerItem));
  for (Array<float>& array : scratch_) array.reserve(scratch);
  items_.clear();
  if (shapes_.empty()) return;
  for (int row = 0; row < batch.num_rows; ++row) {
    const int num_queries = batch.query_start[row + 1] - batch.query_start[row];
    for (int first = 0; first < num_queries; first += kQueriesPerItem)
      for (int kv_head = 0; kv_head < shapes_[0].num_kv_heads; ++kv_head)
        items_.push_back({row, first, std::min(kQueriesPerItem, num_queries - first), kv_head});
  }
}

template <typename T>
void Executor<T>::work(int thread) {
  kernel_.enter();
  auto before = std::chrono::steady_clock::now();
  for (size_t index = 0; index < operations_.size(); ++index) {
    execute(operations_[index], index, thread);
    pool_.barrier();
    if (timed && thread == 0) {
      const auto now = std::chrono::steady_clock::now();
      seconds[index] = std::chrono::duration<double>(now - before).count();
      before = now;
    }
  }
  kernel_.leave();
}

template <typename T>
void Executor<T>::execute(const Operation& op, size_t index, int thread) {
  const int rows = row_count(op);
  const auto share = [&](int total, int per_turn, auto turn) { shares_.run(thread, unsigned(index), total, per_turn, turn); };
  switch (op.kind) {
    case Kind::kEmbedding:
      return share(rows, kRowsPerTurn, [&](int b, int e) { embedding(op, b, e); });
    case Kind::kNorm:
      return share(rows, kRowsPerTurn, [&](int b, int e) { norm(op, b, e); });
    case Kind::kNormAdd:
      return share(rows, kRowsPerTurn, [&](int b, int e) { norm_add(op, b, e); });
    case Kind::kRotaryTable:
      return share(rows, kRowsPerTurn, [&](int b, int e) { rotary_table(op, b, e); });
    case Kind::kRotary:
      // Neighbouring tokens write into the same cache lines, so most of them should be the same thread's.
      return share(rows, kGroup, [&](int b, int e) { rotary(op, b, e); });
    case Kind::kAttention:
      return share(int(items_.size()), 1, [&](int b, int) { attention(op, b, thread); });
    case Kind::kProduct: {
      if (rows == 0) return share(0, 1, [](int, int) {});
      const Blocking cut = blocking(op);
      Block before{};
      share(cut.num_chunks * cut.panels, 1, [&](int b, int) { product(op, cut, b, scratch_[thread].data(), before); });
      if (before.executor != nullptr) finish_rows(before, 0, before.rows);
      return;
    }
  }
}

template <typename T>
typename Executor<T>::Blocking Executor<T>::blocking(const Operation& op) const {
  const Matrix& matrix = *matrices_[op.weight];
  Blocking cut;
  cut.rows = row_count(op);
  cut.panels = matrix.panels;
  // Blocks of one size: a last one of few rows would wait for the multipliers' latency.
  const auto equal_parts = [](int total, int most, int multiple) {
    const int parts = (total + most - 1) / most;
    return ((total + parts - 1) / parts + multiple - 1) / multiple * multiple;
  };
  const int row_bytes = matrix.num_slabs * kSlab * int(sizeof(T));
  const int most_rows = std::max(chunk_bytes() / row_bytes, kernel_.max_rows) / kernel_.max_rows * kernel_.max_rows;
  cut.chunk_rows = equal_parts(cut.rows, most_rows, kernel_.row_multiple);
  cut.num_chunks = (cut.rows + cut.chunk_rows - 1) / cut.chunk_rows;
  cut.block_rows = equal_parts(cut.chunk_rows, kernel_.max_rows, kernel_.row_multiple);
  return cut;
}

// One of chunks x panels. With tiles, a block's sums are finished while the next block is multiplied, be it another
// panel's: `before` is the block that waits for it.
template <typename T>
void Executor<T>::product(const Operation& op, const Blocking& cut, int item, float* scratch, Block& before) {
  const Matrix& matrix = *matrices_[op.weight];
  const size_t slab_stride = size_t(padded_rows(cut.rows)) * kSlab, slab_weights = size_t(kPanel) * kSlab;
  const int panel = item % cut.panels, first_row = item / cut.panels * cut.chunk_rows;
  const int last_row = std::min(first_row + cut.chunk_rows, cut.rows);
  const int num_blocks = (last_row - first_row + cut.block_rows - 1) / cut.block_rows;
  const T* weights = matrix.data.data() + panel * matrix.num_slabs * slab_weights;
  // Several blocks go through a panel part by part, so that each finds the part in the first cache.
  const int num_parts = num_blocks == 1 ? 1 : (matrix.num_slabs + kernel_.most_slabs - 1) / kernel_.most_slabs;
  // Sums have places in turn. One more than there are blocks: `before` still has one.
  const int block_size = kernel_.max_rows * kPanel, num_places = num_parts == 1 ? 2 : num_blocks + 1;
  const int first_place = before.executor == nullptr ? 0 : int(before.sums - scratch) / block_size + 1;
  for (int part = 0; part < num_parts; ++part) {
    const int begin = matrix.num_slabs * part / num_parts, num_slabs = matrix.num_slabs * (part + 1) / num_parts - begin;
    const T* x = slabs_[op.input].data.data() + begin * slab_stride;
    const T* part_weights = weights + begin * slab_weights;
    const size_t part_bytes = num_slabs * slab_weights * sizeof(T);
    // A single block reads its own panel a little ahead; several share out what comes next, which then is there in time.
    uintptr_t ahead = reinterpret_cast<uintptr_t>(part_weights) + (num_blocks == 1 ? kernel_.ahead_bytes : part_bytes);
    for (int i = 0; i < num_blocks; ++i, ahead += part_bytes / num_blocks) {
      const int row = first_row + i * cut.block_rows, rows = std::min(cut.block_rows, last_row - row);
      float* sums = scratch + (first_place + i) % num_places * block_size;
      kernel_.run(x + size_t(row) * kSlab, slab_stride, rows, part_weights, num_slabs, sums, part > 0,
                  {ahead, Ahead::kBytes / num_blocks}, before.finishing());
      before = Block{};
      if (part + 1 < num_parts) continue;
      const Block block{this, &op, &matrix, panel, row, rows, cut.rows, sums};
      if (kernel_.has_tiles) {
        before = block;
      } else {
        finish_rows(block, 0, rows);
      }
    }
  }
}

template <typename T>
AttentionItem<T> Executor<T>::attention_item(const Operation& op, const Item& item) const {
  const int q_size = shapes_[op.attention].width();
  const int first_token = batch_->query_start[item.row] + item.first_query;
  AttentionItem<T> work;
  work.q = slabs_[op.input].data.data() + size_t(first_token) * q_size;
  work.q_stride = q_size;
  work.num_queries = item.num_queries;
  work.first_position = batch_->positions[first_token];
  work.blocks = batch_->table(place(op.layer).group, item.row);
  work.groups_per_block = block_size_ / kGroup;
  work.pool = pools_[place(op.layer).array].data();
  work.kv_head = item.kv_head;
  return work;
}

template <typename T>
void Executor<T>::attention(const Operation& op, int index, int thread) {
  const AttentionShape& shape = shapes_[op.attention];
  const Item& item = items_[index];
  const AttentionItem<T> work = attention_item(op, item);
  const bool is_last = index + 1 == int(items_.size());
  const AttentionItem<T> following = is_last ? work : attention_item(op, items_[index + 1]);
  const SlabsView<T> out = view(op.output, batch_->num_tokens);
  const int first_row = batch_->query_start[item.row] + item.first_query;
  float* scratch = scratch_[thread].data();
  if constexpr (sizeof(T) == 2) {
    if (kernel_.has_tiles && shape.head_dim % 32 == 0)
      return attend_amx(shape, work, is_last ? nullptr : &following, scratch, out, first_row);
  }
  attend(shape, work, is_last ? nullptr : &following, scratch, out, first_row);
}

template class Executor<bf16>;
template class Executor<float>;

}  // namespace noria
