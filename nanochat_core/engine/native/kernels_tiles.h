// The tile instructions of AMX: eight registers of up to 16 rows of 64 bytes, and products of two
// that are added to a third. NF_EMULATED computes the same in C++, for tests on other processors.
//
// Intel's manual defines the arithmetic: a product of bf16 adds even and odd inputs in two fp32 sums
// from 0, in the order of the inputs, and then their sum to what the register holds; no sum of a row
// depends on another row. Numbers too small for fp32's full precision are 0.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>

struct alignas(64) TileShapes {  // as LDTILECFG reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#ifdef NF_EMULATED

struct Tiles {
  TileShapes shapes;
  alignas(64) uint8_t data[8][16][64];
};
static thread_local Tiles tiles;

// Asks the system for the registers; 0, or an error number.
static inline int request_tiles() { return 0; }

static inline void set_tile_shapes(const TileShapes& shapes) { tiles = {shapes, {}}; }
static inline void release_tiles() { tiles = {}; }

template <int TILE>
static inline void tile_zero() {
  std::memset(tiles.data[TILE], 0, sizeof tiles.data[TILE]);
}

template <int TILE>
static inline void tile_load(const void* from, size_t stride) {  // bytes between rows
  tile_zero<TILE>();
  for (int row = 0; row < tiles.shapes.rows[TILE]; ++row)
    std::memcpy(tiles.data[TILE][row], static_cast<const char*>(from) + row * stride,
                tiles.shapes.row_bytes[TILE]);
}

template <int TILE>
static inline void tile_store(void* to, size_t stride) {
  for (int row = 0; row < tiles.shapes.rows[TILE]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tiles.data[TILE][row],
                tiles.shapes.row_bytes[TILE]);
}

static inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f * x : x; }

template <class T>
static inline T tile_number(int tile, int row, int index) {
  T x;
  std::memcpy(&x, tiles.data[tile][row] + index * sizeof x, sizeof x);
  return x;
}

static inline float tile_bf16(int tile, int row, int index) {
  const uint32_t bits = uint32_t{tile_number<uint16_t>(tile, row, index)} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

// each(row, column, number of the sum's register) is the number's new value.
template <int SUM, class T, class Each>
static inline void tile_each(Each each) {
  for (int row = 0; row < tiles.shapes.rows[SUM]; ++row)
    for (int n = 0; n < tiles.shapes.row_bytes[SUM] / 4; ++n) {
      const T x = each(row, n, tile_number<T>(SUM, row, n));
      std::memcpy(tiles.data[SUM][row] + n * sizeof x, &x, sizeof x);
    }
}

template <int SUM, int A, int B>
static inline void tile_bf16_products() {
  tile_each<SUM, float>([](int row, int n, float sum) {
    float parts[2] = {};
    for (int k = 0; k < tiles.shapes.row_bytes[A] / 4; ++k)
      for (int i = 0; i < 2; ++i)
        parts[i] = flushed(std::fma(tile_bf16(A, row, 2 * k + i), tile_bf16(B, k, 2 * n + i), parts[i]));
    return flushed(flushed(sum) + flushed(parts[0] + parts[1]));
  });
}

template <int SUM, int A, int B>
static inline void tile_int8_products() {
  tile_each<SUM, int32_t>([](int row, int n, int32_t sum) {
    for (int k = 0; k < tiles.shapes.row_bytes[A] / 4; ++k)
      for (int i = 0; i < 4; ++i)
        sum += tile_number<uint8_t>(A, row, 4 * k + i) * tile_number<int8_t>(B, k, 4 * n + i);
    return sum;
  });
}

#else

// ARCH_REQ_XCOMP_PERM for the tiles' state, XTILEDATA: Linux saves it only for processes that ask.
static inline int request_tiles() {
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 0 : errno;
}

// Written as instructions: the compilers' intrinsics take no template argument as a register.
static inline void set_tile_shapes(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}
static inline void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
static inline void tile_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}

template <int TILE>
static inline void tile_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(stride) : "memory");
}

template <int SUM, int A, int B>
static inline void tile_bf16_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

template <int SUM, int A, int B>  // unsigned A, signed B
static inline void tile_int8_products() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

#endif
