/* Trees of the nodes that are most likely to be kept, as many as pay: what osd/drafting/growth/best_first.py decides
 * between two calls of a drafter, candidate for candidate, for drafters that are asked level by level in one call.
 */
#ifndef OSD_BEST_FIRST_H
#define OSD_BEST_FIRST_H

#include "common.h"

/* What decides: see PayingTrees in osd/drafting/growth/base.py and StepBudget in osd/economy/plan.py. */
typedef struct {
  const double *chances, *firsts, *edges; /* [depths, ranks, buckets], [depths], [buckets - 1] */
  const double *rounds, *calls;           /* [known] seconds by rows; [priced] by the nodes that are asked about */
  int64_t depths, ranks, buckets, known, priced, levels, children, rows, room;
  double rho; /* tokens that a second is worth */
} Paying;

/* A token that may become a node; `node` is its number then, -1 before. */
typedef struct {
  double chance, estimate;
  int64_t column;
  int32_t row, parent, depth, node;
} Candidate;

/* All candidates, from the most probable on; of equals those that were found first. */
typedef struct {
  Candidate *all;
  int64_t count, taken;
} Pool;

static double chance_of(const Paying *p, int64_t depth, int64_t rank, double estimate) {
  int64_t bucket = 0;
  while (bucket + 1 < p->buckets && p->edges[bucket] <= estimate) bucket++;
  if (depth >= p->depths) depth = p->depths - 1;
  if (rank >= p->ranks) rank = p->ranks - 1;
  return p->chances[(depth * p->ranks + rank) * p->buckets + bucket];
}

static void add_candidate(Pool *pool, Candidate one) {
  int64_t at = pool->count++;
  for (; at && pool->all[at - 1].chance < one.chance; at--) pool->all[at] = pool->all[at - 1];
  pool->all[at] = one;
}

/* How many of the first candidates to take: StepBudget.best. */
static int64_t paying_count(const Paying *p, const Pool *pool) {
  const int64_t count = pool->count < p->room ? pool->count : p->room;
  double gain = 0, best = -p->rho * p->rounds[p->rows];
  int64_t found = 0;
  for (int64_t n = 1; n <= count; n++) {
    gain += pool->all[n - 1].chance;
    const double value = gain - p->rho * p->rounds[p->rows + n];
    if (value > best) best = value, found = n;
  }
  return found;
}

/* Make nodes of the candidates that pay, as far as there is room [sequences]; those at `depth` are put into `level`, and
 * their number is returned. */
static int64_t take_nodes(const Paying *p, Pool *pool, const int32_t *room, int64_t *sizes, int64_t depth, Candidate *level) {
  const int64_t count = paying_count(p, pool);
  int64_t found = 0;
  for (Candidate *one = pool->all; one < pool->all + count; one++) {
    if (one->node >= 0 || sizes[one->row] >= room[one->row]) continue;
    one->node = (int32_t)sizes[one->row]++;
    pool->taken++;
    if (one->depth == depth) level[found++] = *one;
  }
  return found;
}

/* Of the nodes in `level`, those whose first children are expected to bring more than asking takes; they come first
 * afterwards, and their number is returned. */
static int64_t worth_asking(const Paying *p, const Pool *pool, Candidate *level, int64_t count, int64_t depth) {
  const int64_t last = p->known - 1, rows = p->rows + pool->taken < last ? p->rows + pool->taken : last;
  const double first = p->firsts[depth < p->depths ? depth : p->depths - 1];
  const double price = rows < last ? p->rho * (p->rounds[rows + 1] - p->rounds[rows]) : 0;
  double gain = 0, best = 0;
  int64_t asked = 0;
  for (int64_t i = 1; i < count; i++) {
    const Candidate one = level[i];
    int64_t at = i;
    for (; at && level[at - 1].chance * first < one.chance * first; at--) level[at] = level[at - 1];
    level[at] = one;
  }
  for (int64_t n = 1; n <= count; n++) {
    const double more = level[n - 1].chance * first - price;
    gain += more > 0 ? more : 0;
    const double value = gain - p->rho * p->calls[n < p->priced ? n : p->priced - 1];
    if (value > best) best = value, asked = n;
  }
  return asked;
}

#endif
