// Inference on a CPU with AVX-512, BF16 and VNNI, for runner.py: passes, drawing, decoding.
//
// A row is (token, the token before it, position, slot). All layers of a pass are one call. In each
// layer every row writes its key and value into its slot's pages, then attends over them: whether
// rows are chunks of prompts, slots that decode, or both is nothing to any of them, to the bit.

#include "kernels_model.h"

namespace {

std::unique_ptr<Engine> make_engine(const Spec& spec) {
  switch (spec.form) {
    case 0: return std::make_unique<Model<Fp32, Fp32>>(spec);
    case 1: return std::make_unique<Model<Bf16, Bf16>>(spec);
    default: return std::make_unique<Model<Int8, Bf16>>(spec);
  }
}

// One step: `count` slots read their tokens; their logits go to consecutive rows of `logits`.
void read_tokens(Engine& e, int count, const int32_t* slots, float* logits, bool capped,
                 int32_t* drawn) {
  for (int i = 0; i < count; ++i) {
    const int slot = slots[i];
    e.tokens[i] = e.spec.token[slot];
    e.befores[i] = e.spec.before[slot];
    e.positions[i] = e.spec.length[slot];
    e.wanted[i] = i;
  }
  e.pass({count, e.tokens.data(), e.befores.data(), e.positions.data(), slots, count,
          e.wanted.data(), logits, static_cast<size_t>(e.spec.head.panels) * 16, capped, drawn});
  for (int i = 0; i < count; ++i) {
    e.spec.before[slots[i]] = e.spec.token[slots[i]];
    ++e.spec.length[slots[i]];
  }
}

void take_token(const Spec& s, int slot, int token, int limit) {
  s.token[slot] = token;
  if (s.parks[token] || s.length[slot] + 1 >= limit) s.parked[slot] = 1;
}

}  // namespace

// What a pass is called with is checked by the caller; nothing here fails but `nf_open`.
extern "C" {

// Null: there is too little memory, or, with `*unsound`, the counts do not fit the arrays.
void* nf_open(const Spec* spec, int32_t* unsound) {
  constexpr int FORMS = 3, DEPTHS[FORMS] = {Fp32::DEPTH, Bf16::DEPTH, Int8::DEPTH};
  *unsound = spec->form < 0 || spec->form >= FORMS ||
             !is_sound(*spec, DEPTHS[spec->form], spec->form == 0 ? Fp32::DEPTH : Bf16::DEPTH);
  if (*unsound) return nullptr;
  std::unique_ptr<Engine> e;
  try {
    e = make_engine(*spec);
    const size_t slots = spec->num_slots;
    for (auto* v : {&e->tokens, &e->befores, &e->positions, &e->slots, &e->wanted, &e->drawn,
                    &e->places})
      v->resize(slots);
    e->logits = e->logits_memory.make(slots * spec->head.panels * 16);
  } catch (...) {
    return nullptr;
  }
  return e.release();
}

void nf_close(void* engine) { delete static_cast<Engine*>(engine); }

int64_t nf_row_key(int64_t seed, int64_t sample) {
  return static_cast<int64_t>(row_key(static_cast<uint64_t>(seed), static_cast<uint64_t>(sample)));
}

// Rows of any slots, at most max_rows. Logits (num_wanted, head.panels * 16) are capped.
void nf_read(void* engine, int num_rows, const int32_t* tokens, const int32_t* befores,
             const int32_t* positions, const int32_t* slots, int num_wanted, const int32_t* wanted,
             float* logits) {
  Engine& e = *static_cast<Engine*>(engine);
  e.pass({num_rows, tokens, befores, positions, slots, num_wanted, wanted, logits,
          static_cast<size_t>(e.spec.head.panels) * 16, true, nullptr});
}

// One step of slots that are not parked, without drawing: logits as in nf_read.
void nf_step(void* engine, int count, const int32_t* slots, float* logits) {
  read_tokens(*static_cast<Engine*>(engine), count, slots, logits, true, nullptr);
}

// The token that comes at each slot's position, from capped logits (count, stride).
void nf_draw(void* engine, int count, const int32_t* slots, const int32_t* positions,
             const float* logits, int64_t stride, int32_t* drawn) {
  Engine& e = *static_cast<Engine*>(engine);
  for (int i = 0; i < count; ++i)
    drawn[i] = e.draw_row(logits + i * stride, slots[i], positions[i], 0.0f);
}

// See Runner.decode; out (num_steps, count), -1 where a slot is parked.
void nf_decode(void* engine, int count, const int32_t* slots, const int32_t* limits, int num_steps,
               int32_t* out) {
  Engine& e = *static_cast<Engine*>(engine);
  for (int i = 0; i < count; ++i)
    if (e.spec.length[slots[i]] + 1 >= limits[i]) e.spec.parked[slots[i]] = 1;
  for (int step = 0; step < num_steps; ++step, out += count) {
    int going = 0;
    for (int i = 0; i < count; ++i) {
      out[i] = -1;
      if (e.spec.parked[slots[i]]) continue;
      e.slots[going] = slots[i];
      e.places[going++] = i;
    }
    if (going == 0) continue;
    read_tokens(e, going, e.slots.data(), e.logits, false, e.drawn.data());
    for (int i = 0; i < going; ++i) {
      out[e.places[i]] = e.drawn[i];
      take_token(e.spec, e.slots[i], e.drawn[i], limits[e.places[i]]);
    }
  }
}

}  // extern "C"
