// What native_runner.py hands over, and what an engine of any form of numbers keeps.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kernels_draw.h"
#include "kernels_matrix.h"

// native_runner.py's structures of the same names; all pointers stay its own.
struct LayerSpec {
  Matrix qkv, attention_out, fc, mlp_out;
  const void* value_embed;  // (V, kv heads * head width), or null
  int32_t group, index;     // its page group, and its place among the group's layers
  int32_t window;
  float resid, x0;
};

struct GroupSpec {
  char* pool;
  size_t page_bytes;
  const int32_t* table;  // (slots, table_width)
};

struct Spec {
  int32_t form;  // 0: fp32, 1: bf16, 2: int8
  int32_t num_threads, max_rows, num_slots, vocab, depth, num_groups, table_width;
  // Padded to multiples of 16; a head is two halves, each padded. `real` ones count.
  int32_t width, real_width, hidden, num_heads, num_kv_heads, head_width, real_head_width;
  int32_t smear_channels, has_scalars, middle_layer;  // -1: no backout
  float norm_eps, qk_scale, cap, gate_scale, smear_lambda, backout_lambda;
  const void* embedding;     // (V, width)
  const float* smear_gate;   // (smear_channels,), or null
  const float *cos, *sin;    // (positions, head_width / 2)
  const LayerSpec* layers;
  const GroupSpec* groups;
  Matrix head;
  // Of each slot.
  int32_t *length, *token, *before, *parked;
  const DrawRule* rules;
  const uint8_t* parks;  // of each token: whether it parks
};

// Rows of one slot in one page of the groups.
struct Run {
  int first, count;
};

// What a latecomer may read while the caller writes the next pass: it gets one or the other, and
// nothing comes of it, for its phase is over. What is read for a ticket is the pass's own.
template <class T>
class Word {
 public:
  Word(T value = T()) : value_(value) {}
  Word(const Word& other) : Word(static_cast<T>(other)) {}
  Word& operator=(const Word& other) {
    value_.store(other, std::memory_order_relaxed);
    return *this;
  }
  operator T() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<T> value_;
};

struct Pass {
  Word<int> num_rows;
  Word<const int32_t*> tokens, befores, positions, slots;
  Word<int> num_wanted;
  Word<const int32_t*> wanted;
  Word<float*> logits;
  Word<size_t> logits_stride;
  Word<bool> capped;
  Word<int32_t*> drawn;  // of each wanted row, or null where nothing is drawn
};

constexpr int FEW = 4;  // rows up to which every thread prepares all of them for itself
constexpr size_t ALIGNMENT = 64;

template <class T>
class Buffer {
 public:
  T* make(size_t count) {
    const size_t bytes = (count * sizeof(T) + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    data_.reset(static_cast<T*>(std::aligned_alloc(ALIGNMENT, bytes)));
    if (!data_) throw std::bad_alloc();
    std::memset(static_cast<void*>(data_.get()), 0, bytes);
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
};

class Engine {
 public:
  explicit Engine(const Spec& s) : spec(s) {}
  virtual ~Engine() = default;
  virtual void pass(const Pass& pass) = 0;

  int draw_row(const float* logits, int slot, int position, float cap) {
    return draw(logits, spec.vocab, spec.rules[slot], position, cap, caller_space);
  }

  const Spec& spec;  // written to by a refresh of the weights
  DrawSpace caller_space;
  std::vector<int32_t> tokens, befores, positions, slots, wanted, drawn, places;
  Buffer<float> logits_memory;
  float* logits = nullptr;
};
