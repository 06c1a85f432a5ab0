/* A team of threads inside one parallel region: it meets between two steps, and shares out a step's items. */
#ifndef OSD_TEAM_H
#define OSD_TEAM_H

#include <immintrin.h>
#include <sched.h>
#include <stdint.h>

#define LANES 32
#define SPINS 4000

typedef struct {
  _Alignas(64) int64_t taken;
} Lane;

/* All zero before the region starts. */
typedef struct {
  _Alignas(64) int arrived;
  _Alignas(64) unsigned meetings;
  Lane lanes[LANES];
} Team;

typedef struct {
  Team *team;
  int me, count;
} Member;

/* Wait for the others. What each wrote before is seen by all afterwards, and every item can be taken again. */
static inline void meet(const Member *m) {
  Team *team = m->team;
  const unsigned before = __atomic_load_n(&team->meetings, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == m->count) {
    for (int lane = 0; lane < LANES && lane < m->count; lane++)
      __atomic_store_n(&team->lanes[lane].taken, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->meetings, before + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int spins = 0; __atomic_load_n(&team->meetings, __ATOMIC_ACQUIRE) == before; spins++)
    if (spins < SPINS)
      _mm_pause();
    else
      sched_yield(); /* somebody lost its core: let it have this one */
}

/* A member's own items are [first_of, last_of). */
static inline int64_t first_of(const Member *m, int64_t items) {
  const int lanes = m->count < LANES ? m->count : LANES;
  return items * (m->me % lanes) / lanes;
}

static inline int64_t last_of(const Member *m, int64_t items) {
  const int lanes = m->count < LANES ? m->count : LANES;
  return items * (m->me % lanes + 1) / lanes;
}

/* An item of [0, items) that nobody took since the last meeting, or -1. A thread works through neighbouring items,
 * so that it reads memory in order, and then helps the others with theirs. */
static inline int64_t take(const Member *m, int64_t items) {
  const int lanes = m->count < LANES ? m->count : LANES;
  for (int step = 0; step < lanes; step++) {
    const int lane = (m->me + step) % lanes;
    const int64_t first = items * lane / lanes, last = items * (lane + 1) / lanes;
    int64_t *taken = &m->team->lanes[lane].taken;
    if (first + __atomic_load_n(taken, __ATOMIC_RELAXED) >= last) continue;
    const int64_t item = first + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    if (item < last) return item;
  }
  return -1;
}

#endif
