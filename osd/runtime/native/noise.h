/* Keyed random numbers, equal to those of osd/verification/noise.py. */
#ifndef OSD_NOISE_H
#define OSD_NOISE_H

#include <stdint.h>

enum { DRAFT = 1, ACCEPT = 2, RESIDUAL = 3, BONUS = 4 };

static inline uint64_t finalised(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* Return number `index` of a purpose in decoding step `step` of a seed: uniform in (0, 1). */
static inline double number(uint64_t seed, uint64_t step, uint64_t purpose, uint64_t index) {
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t base = finalised(finalised(finalised(seed + golden)) + step * golden);
  const uint64_t stream = finalised(base ^ purpose * 0xbf58476d1ce4e5b9u);
  return ((double)(finalised(stream + (index + 1) * golden) >> 12) + 0.5) * 0x1p-52;
}

#endif
