// Inference on a CPU, for runner.py: passes, sampling, decoding. NF_FORM says of which form of
// numbers, since each takes seconds to compile: 0 fp32, 1 bf16, 2 int8.
//
// A row is (token, the token before it, position, slot). All layers of a pass are one call. In each
// layer every row writes its key and value into its slot's pages, then attends over them: whether
// rows are chunks of prompts, slots that decode, or both is nothing to any of them, to the bit.

#include "kernels_model.h"

namespace {

#if NF_FORM == 0
using Form = Fp32;
#elif NF_FORM == 1
using Form = Bf16;
#else
using Form = Int8;
#endif
using Kept = std::conditional_t<NF_FORM == 0, Fp32, Bf16>;

// One step: `count` slots read their tokens; their logits go to consecutive rows of `logits`.
void forward(Engine& e, int count, const int32_t* slots, float* logits, bool capped,
             int32_t* sampled) {
  for (int i = 0; i < count; ++i) {
    const int slot = slots[i];
    e.tokens[i] = e.spec.token[slot];
    e.prev_tokens[i] = e.spec.prev_token[slot];
    e.positions[i] = e.spec.length[slot];
    e.wanted[i] = i;
  }
  e.pass({count, e.tokens.data(), e.prev_tokens.data(), e.positions.data(), slots, count,
          e.wanted.data(), logits, static_cast<size_t>(e.spec.head.panels) * 16, capped, sampled});
  for (int i = 0; i < count; ++i) {
    e.spec.prev_token[slots[i]] = e.spec.token[slots[i]];
    ++e.spec.length[slots[i]];
  }
}

void take_token(const Spec& s, int slot, int token, int limit) {
  s.token[slot] = token;
  if (s.stops[token] || s.length[slot] + 1 >= limit) s.stopped[slot] = 1;
}

}  // namespace

// What a pass is called with is checked by the caller; nothing here fails but `nf_open`.
extern "C" {

// Asks the system for AMX's registers, for all threads of the process; 0, or an error number.
int nf_request_tiles() {
#ifdef NF_TILES
  return request_tiles();
#else
  return 0;
#endif
}

// Null: there is too little memory, or, with `*unsound`, the counts do not fit the arrays.
void* nf_open(const Spec* spec, int32_t* unsound) {
  *unsound = spec->form != NF_FORM || !is_sound(*spec, Form::DEPTH, Kept::DEPTH);
  if (*unsound) return nullptr;
  std::unique_ptr<Engine> e;
  try {
    e = std::make_unique<Model<Form, Kept>>(*spec);
    const size_t slots = spec->num_slots;
    for (auto* v : {&e->tokens, &e->prev_tokens, &e->positions, &e->slots, &e->wanted, &e->sampled,
                    &e->places})
      v->resize(slots);
    e->logits = e->logits_memory.make(slots * spec->head.panels * 16);
  } catch (...) {
    return nullptr;
  }
  return e.release();
}

void nf_close(void* engine) { delete static_cast<Engine*>(engine); }

// Rows of any slots, at most max_rows. Logits (num_wanted, head.panels * 16) are capped.
void nf_read(void* engine, int num_rows, const int32_t* tokens, const int32_t* prev_tokens,
             const int32_t* positions, const int32_t* slots, int num_wanted, const int32_t* wanted,
             float* logits) {
  Engine& e = *static_cast<Engine*>(engine);
  e.pass({num_rows, tokens, prev_tokens, positions, slots, num_wanted, wanted, logits,
          static_cast<size_t>(e.spec.head.panels) * 16, true, nullptr});
}

// One step of slots that are not stopped, without sampling: logits as in nf_read.
void nf_step(void* engine, int count, const int32_t* slots, float* logits) {
  forward(*static_cast<Engine*>(engine), count, slots, logits, true, nullptr);
}

// The token that comes at each slot's position, from capped logits (count, stride).
void nf_sample(void* engine, int count, const int32_t* slots, const int32_t* positions,
             const float* logits, int64_t stride, int32_t* sampled) {
  Engine& e = *static_cast<Engine*>(engine);
  for (int i = 0; i < count; ++i)
    sampled[i] = e.sample_row(logits + i * stride, slots[i], positions[i], 0.0f);
}

// See Runner.decode; out (num_steps, count), -1 where a slot is stopped.
void nf_decode(void* engine, int count, const int32_t* slots, const int32_t* limits, int num_steps,
               int32_t* out) {
  Engine& e = *static_cast<Engine*>(engine);
  for (int i = 0; i < count; ++i)
    if (e.spec.length[slots[i]] + 1 >= limits[i]) e.spec.stopped[slots[i]] = 1;
  for (int step = 0; step < num_steps; ++step, out += count) {
    int going = 0;
    for (int i = 0; i < count; ++i) {
      out[i] = -1;
      if (e.spec.stopped[slots[i]]) continue;
      e.slots[going] = slots[i];
      e.places[going++] = i;
    }
    if (going == 0) continue;
    forward(e, going, e.slots.data(), e.logits, false, e.sampled.data());
    for (int i = 0; i < going; ++i) {
      out[e.places[i]] = e.sampled[i];
      take_token(e.spec, e.slots[i], e.sampled[i], limits[e.places[i]]);
    }
  }
}

}  // extern "C"
