// Runs a compiled program, a flat list of operations over buffers, for one step at a time: `Executor<T>`.
//
// T is the type of weights, KV and products' inputs. Two kinds of buffers: `rows` are float32 [rows][width], `slabs` hold
// a product's input as gemm.h wants it. A step is one parallel region; every operation is shared out over the threads and
// ends at a barrier. Who computes what never changes a result.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "memory.h"
#include "quants.h"
#include "sampling.h"
#include "threads.h"

namespace noria {

// One step's input; see noria.runner.executor.ForwardBatch. Pointers are the caller's. Groups of layers have their slots,
// and their tables, one group's behind the other's.
struct Batch {
  int num_tokens, num_rows, num_logits, table_width, num_groups = 1;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* query_start;
  const int32_t* context_len;
  const int32_t* block_table;
  const int32_t* logit_tokens;

  const int32_t* slots_of(int group) const { return slots + size_t(group) * num_tokens; }
  const int32_t* table(int group, int row) const {
    return block_table + (size_t(group) * num_rows + row) * table_width;
  }
};

// Rows of a matrix as a file has them, one behind the other.
struct EncodedRows {
  const uint8_t* data;
  const Encoding& encoding;
  int num_rows;
  int interleaved_heads = 0;  // so many heads whose rotary pairs stand side by side, which we want half a head apart

  int place_in_file(int row) const {
    if (interleaved_heads == 0) return row;
    const int head_dim = num_rows / interleaved_heads, within = row % head_dim;
    return row - within + within % (head_dim / 2) * 2 + within / (head_dim / 2);
  }
};

enum class Epilogue { kStore, kAdd, kSiluMul, kGeluMul };

enum class Kind { kEmbedding, kNorm, kNormAdd, kProduct, kRotaryTable, kRotary, kAttention };

struct Operation {
  Kind kind;
  int input = -1;       // buffer: rows or slabs, as the kind wants
  int table = -1;       // kRotary: the rows that kRotaryTable made; none: no rotation
  int output = -1;
  int weight = -1;      // matrix or vector
  int layer = -1;
  int attention = -1;   // index of a shape
  int q_norm = -1, k_norm = -1;  // kRotary: vectors, of norms of each head before it is rotated
  float epsilon = 0;    // of norms
  float factor = 1;     // of what an embedding or a product gives, before it is added, and of a rotary table
  float soft_cap = 0;   // kProduct that stores: soft_cap * tanh(y / soft_cap); 0: y as it is
  Epilogue epilogue = Epilogue::kStore;
  bool selects = false;      // kNorm: takes only the rows whose logits are wanted
  bool on_logit_rows = false;  // has as many rows as logits are wanted, not as there are tokens
  std::string label;
};

// By name, for Python. Raise std::invalid_argument.
Kind kind_of(const std::string& name);
Epilogue epilogue_of(const std::string& name);

template <typename T>
class Executor {
 public:
  Executor(int num_threads, GemmKernel<T> kernel);

  // Weights. First the shape, then the rows, in any number of calls: rows `begin` to `end` of a source, as the file
  // encodes them, become the matrix's from `first_row` + `begin` on.
  int begin_matrix(int outputs, int inputs, bool interleave);
  void fill_matrix(int matrix, int first_row, const EncodedRows& source, int begin, int end);
  void set_bias(int matrix, std::vector<float> bias);
  int add_vector(std::vector<float> values);
  // Other values for a vector that operations read: from the next step on.
  void set_vector(int vector, std::vector<float> values);

  int add_rows(int width);
  int add_slabs(int width);
  int add_attention(AttentionShape shape);
  void add_operation(Operation operation);

  // Where layers have their KV: layer i in the blocks of group group_of[i], in the array_of[i]th array of the pool. Without
  // a call all are in one group, each with an array of its own. A window of 0 is none.
  void place_layers(const std::vector<int>& group_of, const std::vector<int>& array_of, std::vector<int> windows);
  void allocate_kv(int num_arrays, int num_blocks, int block_size, int attention);

  // Has the system provide the pool's memory now, and not one page after the other as it is written to.
  void touch_kv();

  // Raises std::invalid_argument if the batch names a token, slot, block or row that is not there: nothing of that kind
  // reaches the kernels. That two tokens are not given the same slot is the caller's business.
  void check(const Batch& batch) const;

  // Runs all operations. The last one's output rows are the result: [num_logits][width], until the next step.
  const float* run(const Batch& batch);
  // What keeps the result's memory mapped, whatever becomes of its content.
  std::shared_ptr<const void> result_memory() const { return rows_[operations_.back().output].memory; }

  int result_width() const;

  // Chooses a token for each row, on the executor's threads; see sampling.h.
  void sample(const SamplingRows& rows) { sampler_.run(rows, pool_); }

  int num_layers() const;  // that the operations name
  int matrix_inputs(int matrix) const { return matrices_.at(matrix)->inputs; }
  size_t weight_bytes() const;
  const char* kernel_name() const { return kernel_.name; }
  int num_threads() const { return pool_.size(); }
  // Seconds spent in each operation of the last step, if asked for before it.
  std::vector<double> seconds;
  bool timed = false;

 private:
  struct Matrix {
    int outputs, inputs, panels, num_slabs;
    bool interleave;
    Span<T> data;
    std::vector<float> bias;  // padded, in the order of packed outputs
  };
  struct Rows {
    int width;
    std::shared_ptr<Array<float>> memory = std::make_shared<Array<float>>();
    float* data() const { return memory->data(); }
    void reserve(size_t size) {  // a result that somebody still holds keeps its memory
      if (size > memory->size()) memory = std::make_shared<Array<float>>(size + size / 4);
    }
  };
  struct Slabs {
    int width;
    Array<T> data;
  };
  // How a product's rows are cut: chunks that stay in a core's cache, and in them blocks of a kernel's size.
  struct Blocking {
    int rows, block_rows, chunk_rows, num_chunks, panels;
  };
  // Sums [rows][32] for the outputs of a panel, and where they go.
  struct Block {
    Executor* executor = nullptr;
    const Operation* op = nullptr;
    const Matrix* matrix = nullptr;
    int panel = 0, first_row = 0, rows = 0;
    int num_rows = 0;  // of the whole product
    float* sums = nullptr;

    // The rest of the product, for some of the rows.
    Meanwhile finishing() const { return {finish, this, executor == nullptr ? 0 : rows}; }
    static void finish(const void* block, int begin, int end) {
      const Block& self = *static_cast<const Block*>(block);
      self.executor->finish_rows(self, begin, end);
    }
  };
  struct Item {
    int row, first_query, num_queries, kv_head;
  };

  int row_count(const Operation& op) const { return op.on_logit_rows ? batch_->num_logits : batch_->num_tokens; }
  int padded_rows(int rows) const { return (rows + kernel_.row_multiple - 1) / kernel_.row_multiple * kernel_.row_multiple; }
  SlabsView<T> view(int slabs, int rows) { return {slabs_[slabs].data.data(), size_t(padded_rows(rows)) * kSlab}; }
  void pack_rows(Matrix& matrix, int first_row, int num_rows, const float* values);
  size_t packed_index(const Matrix& matrix, int packed_row, int k) const {
    const size_t panel = size_t(packed_row / kPanel) * kPanel * matrix.num_slabs * kSlab;
    const int column = packed_row % kPanel;
    if constexpr (sizeof(T) == 2) return panel + size_t(k / 2) * kPanel * 2 + column * 2 + k % 2;
    return panel + size_t(k) * kPanel + column;
  }
  int packed_row(const Matrix& matrix, int row) const;

  Blocking blocking(const Operation& op) const;
  void prepare(const Batch& batch);
  void work(int thread);
  void execute(const Operation& op, size_t index, int thread);
  // Those that look at one row at a time are in operations.cpp.
  void embedding(const Operation& op, int begin, int end);
  void norm(const Operation& op, int begin, int end);
  void norm_add(const Operation& op, int begin, int end);
  void product(const Operation& op, const Blocking& blocking, int item, float* scratch, Block& before);
  void finish_rows(const Block& block, int begin, int end);
  template <typename Activation>
  void finish_gated(const Block& block, int begin, int end, Activation activation);
  void rotary_table(const Operation& op, int begin, int end);
  void rotary(const Operation& op, int begin, int end);
  AttentionItem<T> attention_item(const Operation& op, const Item& item) const;
  void attention(const Operation& op, int index, int thread);

  GemmKernel<T> kernel_;
  Arena<T> weights_;
  std::vector<std::unique_ptr<Matrix>> matrices_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Rows> rows_;
  std::vector<Slabs> slabs_;
  std::vector<AttentionShape> shapes_;
  std::vector<Operation> operations_;
  struct Place {
    int group, array;
  };
  Place place(int layer) const { return places_.empty() ? Place{0, layer} : places_[layer]; }

  std::vector<Place> places_;      // of layers, if there are groups
  std::vector<int> windows_ = {0};  // of groups
  std::vector<Array<T>> pools_;    // arrays of KV, one for each layer of a group
  int block_size_ = 0;
  int num_blocks_ = 0;

  const Batch* batch_ = nullptr;
  std::vector<Item> items_;
  Shares shares_;
  std::vector<Array<float>> scratch_;  // per thread
  Sampler sampler_;
  ThreadPool pool_;  // last: its threads end before what they use
};

}  // namespace noria
