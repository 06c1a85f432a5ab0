/* Team of threads inside one parallel region, with a barrier between steps and a shared queue of a step's items. */
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

/* Must be all zero before the region starts. */
typedef struct {
  _Alignas(64) int arrived;
  _Alignas(64) unsigned meetings;
  Lane lanes[LANES];
} Team;

typedef struct {
  Team *team;
  int me, count;
} Member;

/* Wait for the other members. Afterwards all see each other's writes, and every item can be taken again. */
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
      sched_yield(); /* a member has lost its core: yield this one */
}

/* A member takes the items [first_of, last_of) first. */
static inline int64_t first_of(const Member *m, int64_t items) {
  const int lanes = m->count < LANES ? m->count : LANES;
  return items * (m->me % lanes) / lanes;
}

static inline int64_t last_of(const Member *m, int64_t items) {
  const int lanes = m->count < LANES ? m->count : LANES;
  return items * (m->me % lanes + 1) / lanes;
}

/* Return an item of [0, items) that no member has taken since the last meeting, or -1. A thread takes adjacent items, so
 * that it reads memory in order, and then the remaining items of other members. */
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
