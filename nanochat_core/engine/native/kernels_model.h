// A pass of the model over rows, phase by phase, for a Form of numbers that its matrices are in and
// a Kept form, that of keys, values and tables: fp32 and fp32, bf16 and bf16, int8 and bf16. The
// stream of activations between the layers is fp32 in all of them.
#pragma once

#include <type_traits>

#include "kernels_attention.h"
#include "kernels_spec.h"
#include "kernels_threads.h"

template <class Form, class Kept>
class Model : public Engine {
 public:
  explicit Model(const Spec& s)
      : Engine(s), crew_(s.num_threads, [this](Crew::Member& m) { walk(m); }) {
    const size_t rows = s.max_rows, q = s.num_heads * s.head_width;
    qkv_width_ = s.depth ? 16 * largest_qkv() : 0;
    widest_ = std::max({size_t(s.width), size_t(s.hidden), q});
    x_ = x_memory_.make(rows * s.width);
    first_ = first_memory_.make(rows * s.width);
    middle_ = middle_memory_.make(rows * s.width);
    qkv_ = qkv_memory_.make(rows * qkv_width_);
    wide_ = wide_memory_.make(rows * widest_);
    queries_ = queries_memory_.make(rows * q);
    shared_ = shared_memory_.make(rows * widest_);
    direct_ = direct_memory_.make(rows * widest_);
    scales_ = scales_memory_.make(rows);
    runs_.reserve(rows);
    const size_t keys = (s.table_width + 1) * PAGE;
    for (int i = 0; i < s.num_threads; ++i) {
      auto& own = own_.emplace_back(std::make_unique<Own>());
      own->packed = own->packed_memory.make(FEW * widest_);
      own->scales = own->scales_memory.make(FEW);
      own->row = own->row_memory.make(widest_);
      own->head = own->head_memory.make(4 * s.head_width);
      own->attention = {own->queries_memory.make(MAX_QUERIES * s.head_width),
                        own->scores_memory.make(MAX_QUERIES * keys),
                        own->weights_memory.make(MAX_QUERIES * keys),
                        own->pages_memory.make(s.table_width + 1), keys};
    }
  }

  void pass(const Pass& pass) override {
    pass_ = pass;
    runs_.clear();
    is_single_ = true;
    seen_.assign(spec.num_slots, 0);
    for (int row = 0; row < pass.num_rows; ++row) {
      const bool follows = row > 0 && pass.slots[row] == pass.slots[row - 1];
      if (follows && pass.positions[row] % PAGE != 0) ++runs_.back().count;
      else runs_.push_back({row, 1});
      if (seen_[pass.slots[row]]) is_single_ = false;
      seen_[pass.slots[row]] = 1;
    }
    num_runs_ = static_cast<int>(runs_.size());
    crew_.run();
  }

 private:
  static constexpr bool DIRECT = !std::is_same_v<Form, Int8>;  // rows are packed as they are made

  struct Own {
    Buffer<int32_t> packed_memory, queries_memory, weights_memory;
    Buffer<float> scales_memory, row_memory, head_memory, scores_memory;
    Buffer<const int32_t*> pages_memory;
    int32_t* packed;
    float *scales, *row, *head;
    AttentionSpace attention;
    SamplingSpace sampling;
  };

  int largest_qkv() const {
    int panels = 0;
    for (int i = 0; i < spec.depth; ++i) panels = std::max(panels, spec.layers[i].qkv.panels);
    return panels;
  }

  // What every thread of the crew does; each `if` gives up where the pass is over.
  void walk(Crew::Member& m) {
    const int rows = pass_.num_rows;
    if (!each(m, rows, [&](int row) { embed(row); })) return;
    for (int layer = 0; layer < spec.depth; ++layer) {
      if (!attend_layer(m, layer) || !mlp_layer(m, layer)) return;
    }
    Activations a;
    const auto fill = [&](int i, int32_t* out, float* scale) { pack_last(m, i, out, scale); };
    if (!prepare(m, pass_.num_wanted, spec.width, fill, &a)) return;
    const float cap = spec.cap;
    const auto take = [&](int i, int panel, Floats value) {
      store(pass_.logits + i * pass_.logits_stride + panel * 16,
            pass_.capped ? softcap16(value, cap) : value);
    };
    if (!product(m, spec.head, a, pass_.num_wanted, take)) return;
    if (pass_.sampled == nullptr) return;
    crew_.phase(m, pass_.num_wanted, [&](int i) {
      const int row = pass_.wanted[i];
      pass_.sampled[i] = sample(pass_.logits + i * pass_.logits_stride, spec.vocab,
                            spec.rules[pass_.slots[row]], pass_.positions[row] + 1,
                            pass_.capped ? 0.0f : cap, own_[m.index]->sampling);
    });
  }

  // Of the last layer only the wanted rows are of use, once all keys and values are written: rows
  // that continue, and which row of the pass the i-th of them is.
  bool is_cut(int layer) const {
    return layer == spec.depth - 1 && pass_.num_wanted < pass_.num_rows;
  }

  int rows_after(int layer) const { return is_cut(layer) ? pass_.num_wanted : pass_.num_rows; }

  int row_after(int layer, int i) const { return is_cut(layer) ? pass_.wanted[i] : i; }

  bool attend_layer(Crew::Member& m, int layer) {
    const LayerSpec& l = spec.layers[layer];
    const int rows = pass_.num_rows, left = rows_after(layer);
    Activations a;
    const auto normed = [&](int row, int32_t* out, float* scale) {
      float* x = own_[m.index]->row;
      for (int c = 0; c < spec.width; c += 16) store(x + c, entering(l, row, c));
      pack_row<Form>(x, spec.width, inverse_rms(x, spec.width, spec.real_width, spec.norm_eps),
                     false, out, scale);
    };
    if (!prepare(m, rows, spec.width, normed, &a)) return false;
    const auto keep = [&](int row, int panel, Floats value) {
      store(qkv_ + row * qkv_width_ + panel * 16, value);
    };
    if (!product(m, l.qkv, a, rows, keep)) return false;
    const int kv = spec.num_kv_heads;
    const auto write = [&](int i) { write_heads(m, l, runs_[i / kv], i % kv); };
    const auto read = [&](int i) {
      const Run run = runs_[i / kv];
      attend_run(m, l, run, i % kv, run.first);
    };
    const auto read_wanted = [&](int i) {
      attend_run(m, l, {row_after(layer, i / kv), 1}, i % kv, i / kv);
    };
    const auto both = [&](int i) {
      write(i);
      read(i);
    };
    if (is_cut(layer)) {
      if (!crew_.phase(m, num_runs_ * kv, write)) return false;
      if (!crew_.phase(m, left * kv, read_wanted)) return false;
    } else if (is_single_) {  // no row sees what another one writes
      if (!crew_.phase(m, num_runs_ * kv, both)) return false;
    } else {
      if (!crew_.phase(m, num_runs_ * kv, write)) return false;
      if (!crew_.phase(m, num_runs_ * kv, read)) return false;
    }
    if (!packed(m, left, spec.num_heads * spec.head_width, false, &a)) return false;
    const auto add = [&](int i, int panel, Floats value) {
      const int c = panel * 16, row = row_after(layer, i);
      store(x_ + row * spec.width + c, entering(l, row, c) + value);
    };
    return product(m, l.attention_out, a, left, add);
  }

  bool mlp_layer(Crew::Member& m, int layer) {
    const LayerSpec& l = spec.layers[layer];
    const int rows = rows_after(layer);
    Activations a;
    const auto normed = [&](int i, int32_t* out, float* scale) {
      const float* x = x_ + row_after(layer, i) * spec.width;
      pack_row<Form>(x, spec.width, inverse_rms(x, spec.width, spec.real_width, spec.norm_eps),
                     false, out, scale);
    };
    if (!prepare(m, rows, spec.width, normed, &a)) return false;
    const auto squared = [&](int i, int panel, Floats value) {
      value = max(splat(0.0f), value);  // a NaN stays one
      put(i, spec.hidden, panel * 16, value * value);
    };
    if (!product(m, l.fc, a, rows, squared)) return false;
    if (!packed(m, rows, spec.hidden, true, &a)) return false;
    const bool is_middle = layer == spec.middle_layer;
    const auto add = [&](int i, int panel, Floats value) {
      const size_t at = static_cast<size_t>(row_after(layer, i)) * spec.width + panel * 16;
      value = load(x_ + at) + value;
      store(x_ + at, value);
      if (is_middle) store(middle_ + at, value);
    };
    return product(m, l.mlp_out, a, rows, add);
  }

  // do_row of every row, a few rows to a ticket.
  template <class Do>
  bool each(Crew::Member& m, int rows, Do do_row) {
    const int share = std::max(1, rows / (4 * crew_.size()));
    return crew_.phase(m, (rows + share - 1) / share, [&](int i) {
      for (int row = i * share; row < std::min(rows, (i + 1) * share); ++row) do_row(row);
    });
  }

  // fill(i, packed row, its scale) for i < rows. Few rows are cheaper made by everyone than shared.
  template <class Fill>
  bool prepare(Crew::Member& m, int rows, int width, Fill fill, Activations* a) {
    const size_t lda = width / Form::DEPTH;
    if (rows <= FEW) {
      Own& own = *own_[m.index];
      *a = {own.packed, lda, own.scales, 128};
      if (!crew_.is_late(m))
        for (int i = 0; i < rows; ++i) fill(i, own.packed + i * lda, own.scales + i);
      return true;
    }
    *a = {shared_, lda, scales_, 128};
    return each(m, rows, [&](int i) { fill(i, shared_ + i * lda, scales_ + i); });
  }

  // What `put` put, as activations.
  bool packed(Crew::Member& m, int rows, int width, bool positive, Activations* a) {
    if constexpr (DIRECT) {
      *a = {direct_, static_cast<size_t>(width) / Form::DEPTH, nullptr, 0};
      return true;
    } else {
      const auto fill = [&](int row, int32_t* out, float* scale) {
        pack_row<Form>(wide_ + static_cast<size_t>(row) * width, width, 1.0f, positive, out, scale);
      };
      const bool goes_on = prepare(m, rows, width, fill, a);
      a->zero = positive ? 0 : 128;
      return goes_on;
    }
  }

  void put(int row, int width, int at, Floats value) {
    const size_t place = static_cast<size_t>(row) * width + at;
    if constexpr (DIRECT) store16<Form>(direct_, place, value);
    else store(wide_ + place, value);
  }

  template <class Take>
  bool product(Crew::Member& m, const Matrix& matrix, const Activations& a, int rows, Take take) {
    if (rows == 0) return true;
    const int threads = crew_.size();
    const int least = rows <= 3 ? 8 : 4, most = rows <= MAX_TILE_ROWS ? 64 : 8;
    int share = round_up(std::max(1, matrix.panels / (4 * threads)), least);
    share = std::min(share, most);
    const int columns = (matrix.panels + share - 1) / share;
    int rows_each = rows;  // where columns are too few for the threads, rows are shared out too
    while (columns * ((rows + rows_each - 1) / rows_each) < 2 * threads && rows_each > 24)
      rows_each = (rows_each + 1) / 2;
    const int bands = (rows + rows_each - 1) / rows_each;
    return crew_.phase(m, columns * bands, [&](int i) {
      const int panel = i / bands * share, row = i % bands * rows_each;
      multiply<Form>(matrix, a, row, std::min(rows_each, rows - row), panel,
                     std::min(share, matrix.panels - panel), take);
    });
  }

  // Sixteen numbers of the stream as it enters a layer.
  Floats entering(const LayerSpec& l, int row, int c) const {
    const size_t at = static_cast<size_t>(row) * spec.width + c;
    const Floats x = load(x_ + at);
    if (!spec.has_scalars) return x;
    return fma(splat(l.resid), x, splat(l.x0) * load(first_ + at));
  }

  void load_embedding(int token, float* out) const {
    const size_t start = static_cast<size_t>(token) * spec.width;
    for (int c = 0; c < spec.width; c += 16)
      store(out + c, load16<Kept>(spec.embedding, start + c));
    const Floats scale = splat(inverse_rms(out, spec.width, spec.real_width, spec.norm_eps));
    for (int c = 0; c < spec.width; c += 16)
      store(out + c, load(out + c) * scale);
  }

  void embed(int row) {
    float *x = x_ + static_cast<size_t>(row) * spec.width,
          *first = first_ + static_cast<size_t>(row) * spec.width;
    load_embedding(pass_.tokens[row], x);
    if (spec.smear_gate != nullptr && pass_.positions[row] > 0) {
      float sum = 0.0f;
      for (int c = 0; c < spec.smear_channels; ++c) sum += x[c] * spec.smear_gate[c];
      const Floats gate = splat(spec.smear_lambda * sigmoid(sum));
      load_embedding(pass_.prev_tokens[row], first);
      for (int c = 0; c < spec.width; c += 16)
        store(x + c, fma(gate, load(first + c), load(x + c)));
    }
    std::memcpy(first, x, sizeof(float) * spec.width);
  }

  void pack_last(Crew::Member& m, int i, int32_t* out, float* scale) {
    const size_t start = static_cast<size_t>(pass_.wanted[i]) * spec.width;
    float* x = own_[m.index]->row;
    std::memcpy(x, x_ + start, sizeof(float) * spec.width);
    if (spec.middle_layer >= 0)
      for (int c = 0; c < spec.width; c += 16)
        store(x + c, fnma(splat(spec.backout_lambda), load(middle_ + start + c), load(x + c)));
    pack_row<Form>(x, spec.width, inverse_rms(x, spec.width, spec.real_width, spec.norm_eps), false,
                   out, scale);
  }

  // A query or a key: rotated, normalised, packed.
  void turn(const float* head, int position, float* space, int32_t* out) const {
    const int half = spec.head_width / 2;
    const float *cos = spec.cos + static_cast<size_t>(position) * half,
                *sin = spec.sin + static_cast<size_t>(position) * half;
    for (int c = 0; c < half; c += 16) {
      const Floats a = load(head + c), b = load(head + half + c);
      const Floats co = load(cos + c), si = load(sin + c);
      store(space + c, fma(a, co, b * si));
      store(space + half + c, fms(b, co, a * si));
    }
    const float scale =
        inverse_rms(space, spec.head_width, spec.real_head_width, spec.norm_eps) * spec.qk_scale;
    for (int c = 0; c < spec.head_width; c += 16)
      store16<Kept>(out, c, load(space + c) * splat(scale));
  }

  int32_t* block(const LayerSpec& l, int slot, int page, int head, int part) const {
    const GroupSpec& g = spec.groups[l.group];
    const size_t words = static_cast<size_t>(PAGE) * spec.head_width / Kept::DEPTH;
    const int number = g.table[static_cast<size_t>(slot) * spec.table_width + page];
    const size_t place = (static_cast<size_t>(l.index) * spec.num_kv_heads + head) * 2 + part;
    return reinterpret_cast<int32_t*>(g.pool + number * g.page_bytes) + place * words;
  }

  // Queries, keys and values of a run's rows that belong to one key/value head.
  void write_heads(Crew::Member& m, const LayerSpec& l, Run run, int kv_head) {
    const int d = spec.head_width, shared = spec.num_heads / spec.num_kv_heads;
    const int words = d / Kept::DEPTH;
    float* space = own_[m.index]->head;
    auto* key = reinterpret_cast<int32_t*>(space + d);
    auto* value = reinterpret_cast<int32_t*>(space + 2 * d);
    const int slot = pass_.slots[run.first], page = pass_.positions[run.first] / PAGE;
    int32_t *keys = block(l, slot, page, kv_head, 0), *values = block(l, slot, page, kv_head, 1);
    for (int row = run.first; row < run.first + run.count; ++row) {
      const float* in = qkv_ + row * qkv_width_;
      const int position = pass_.positions[row];
      for (int h = kv_head * shared; h < (kv_head + 1) * shared; ++h)
        turn(in + h * d, position, space,
             queries_ + (static_cast<size_t>(row) * spec.num_heads + h) * words);
      const float* in_keys = in + spec.num_heads * d;
      const float* in_values = in_keys + spec.num_kv_heads * d;
      turn(in_keys + kv_head * d, position, space, key);
      Floats gate = splat(0.0f);
      if (l.value_embed != nullptr)
        gate = splat(spec.gate_scale *
                              sigmoid(in_values[spec.num_kv_heads * d + kv_head]));
      const size_t token = pass_.tokens[row], embed = (token * spec.num_kv_heads + kv_head) * d;
      for (int c = 0; c < d; c += 16) {
        Floats v = load(in_values + kv_head * d + c);
        if (l.value_embed != nullptr)
          v = fma(gate, load16<Kept>(l.value_embed, embed + c), v);
        store16<Kept>(value, c, v);
      }
      write_key_value<Kept>(keys, values, position % PAGE, d, key, value);
    }
  }

  // The heads that share a key/value head attend, for each row of a run; what comes of it is put
  // into rows from `target` on.
  void attend_run(Crew::Member& m, const LayerSpec& l, Run run, int kv_head, int target) {
    const int d = spec.head_width, shared = spec.num_heads / spec.num_kv_heads;
    const int words = d / Kept::DEPTH, total = run.count * shared, slot = pass_.slots[run.first];
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(spec.real_head_width));
    const auto keys = [&](int page) { return block(l, slot, page, kv_head, 0); };
    const auto values = [&](int page) { return block(l, slot, page, kv_head, 1); };
    for (int start = 0; start < total; start += MAX_QUERIES) {
      const int count = std::min(MAX_QUERIES, total - start);
      Query queries[MAX_QUERIES];
      for (int i = 0; i < count; ++i) {
        const int row = run.first + (start + i) / shared, position = pass_.positions[row];
        const int head = kv_head * shared + (start + i) % shared;
        queries[i] = {position, std::max(0, position - l.window),
                      queries_ + (static_cast<size_t>(row) * spec.num_heads + head) * words};
      }
      const auto take = [&](int i, int channel, Floats value) {
        const int head = kv_head * shared + (start + i) % shared;
        put(target + (start + i) / shared, spec.num_heads * d, head * d + channel, value);
      };
      attend<Kept>(own_[m.index]->attention, queries, count, d, scale, keys, values, take);
    }
  }

  Pass pass_{};
  std::vector<Run> runs_;
  std::vector<uint8_t> seen_;
  Word<int> num_runs_;
  Word<bool> is_single_;  // no two rows are of one slot
  size_t qkv_width_, widest_;
  Buffer<float> x_memory_, first_memory_, middle_memory_, qkv_memory_, wide_memory_, scales_memory_;
  Buffer<int32_t> queries_memory_, shared_memory_, direct_memory_;
  float *x_, *first_, *middle_, *qkv_, *wide_, *scales_;
  int32_t *queries_, *shared_, *direct_;
  std::vector<std::unique_ptr<Own>> own_;
  Crew crew_;  // last: its threads see everything above, and end first
};
