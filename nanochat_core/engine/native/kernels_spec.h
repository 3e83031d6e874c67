// What runner.py hands over, and what an engine of any form of numbers keeps.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kernels_sample.h"
#include "kernels_matrix.h"

// The structures of runner.py and weights.py; all pointers stay its own.
struct LayerSpec {
  Matrix qkv, attention_out, fc, mlp_out;
  const void* value_embed;  // (V, kv heads * head width), or null
  int32_t group, index;     // its page group, and its place among the group's layers
  int32_t window;
  float resid, x0;
  size_t value_embed_size;  // numbers
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
  int32_t *length, *token, *prev_token, *stopped;
  const SamplingRule* rules;
  const uint8_t* stops;  // of each token: whether it stops
  // Numbers that those who own them have, against which `is_sound` holds the counts above.
  size_t embedding_size, smear_gate_size, rotary_size, slots_size, stops_size;
};

// Whether every index that a pass computes from the counts stays inside of the arrays. The rows of a
// pass, which the caller checks, are not among them.
static inline bool is_sound(const Spec& s, int depth_of_form, int depth_of_kept) {
  const auto is = [&](const Matrix& m, int64_t least_out, int64_t in) {
    return m.data != nullptr && int64_t{m.panels} * 16 >= least_out && m.panels <= 1 << 24 &&
           int64_t{m.steps} * depth_of_form == in;
  };
  constexpr int MOST = 1 << 24;  // far from where 32 bits end, also four times
  for (const int count : {s.num_threads, s.max_rows, s.num_slots, s.vocab, s.depth, s.num_groups,
                          s.table_width, s.width, s.real_width, s.hidden, s.num_heads,
                          s.num_kv_heads, s.head_width, s.real_head_width})
    if (count < 1 || count > MOST) return false;
  const int64_t heads = int64_t{s.num_heads} * s.head_width,
                kv_heads = int64_t{s.num_kv_heads} * s.head_width;
  if (s.width % 16 || s.hidden % 16 || s.head_width % 32 || s.num_heads % s.num_kv_heads ||
      s.real_width > s.width || s.real_head_width > s.head_width || heads > MOST ||
      s.middle_layer < -1 || s.middle_layer >= s.depth)
    return false;
  if (s.smear_gate != nullptr && (s.smear_channels < 1 || s.smear_channels > s.real_width ||
                                  static_cast<size_t>(s.smear_channels) > s.smear_gate_size))
    return false;
  if (s.embedding_size < static_cast<size_t>(s.vocab) * s.width ||
      s.stops_size < static_cast<size_t>(s.vocab) ||
      s.slots_size < static_cast<size_t>(s.num_slots) ||
      s.rotary_size < (static_cast<size_t>(s.table_width - 1) * 16 + 1) * (s.head_width / 2) ||
      !is(s.head, s.vocab, s.width))
    return false;
  for (int i = 0; i < s.depth; ++i) {
    const LayerSpec& l = s.layers[i];
    const bool has_embed = l.value_embed != nullptr;
    if (!is(l.qkv, heads + 2 * kv_heads + (has_embed ? s.num_kv_heads : 0), s.width) ||
        !is(l.attention_out, s.width, heads) || l.attention_out.panels * 16 != s.width ||
        !is(l.fc, s.hidden, s.width) || l.fc.panels * 16 != s.hidden ||
        !is(l.mlp_out, s.width, s.hidden) || l.mlp_out.panels * 16 != s.width)
      return false;
    if (has_embed && l.value_embed_size < static_cast<size_t>(s.vocab) * kv_heads) return false;
    if (l.group < 0 || l.group >= s.num_groups || l.index < 0 || l.index >= s.depth || l.window < 0)
      return false;
    const size_t of_layer = static_cast<size_t>(kv_heads) * 2 * 16 / depth_of_kept * 4;
    if (s.groups[l.group].page_bytes < (l.index + 1) * of_layer) return false;
  }
  return true;
}

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
  Word<const int32_t*> tokens, prev_tokens, positions, slots;
  Word<int> num_wanted;
  Word<const int32_t*> wanted;
  Word<float*> logits;
  Word<size_t> logits_stride;
  Word<bool> capped;
  Word<int32_t*> sampled;  // of each wanted row, or null where nothing is sampled
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

  int sample_row(const float* logits, int slot, int position, float cap) {
    return sample(logits, spec.vocab, spec.rules[slot], position, cap, caller_space);
  }

  const Spec& spec;  // written to by a refresh of the weights
  SamplingSpace caller_space;
  std::vector<int32_t> tokens, prev_tokens, positions, slots, wanted, sampled, places;
  Buffer<float> logits_memory;
  float* logits = nullptr;
};
