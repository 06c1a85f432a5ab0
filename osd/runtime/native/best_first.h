/* Growth of trees from the most probable candidates, as many as pay. The decisions equal those of
 * osd/drafting/growth/best_first.py between two calls of a drafter, but all levels are drafted in a single call.
 */
#ifndef OSD_BEST_FIRST_H
#define OSD_BEST_FIRST_H

#include "common.h"

/* Chances and costs: see GrowthPlan in osd/drafting/growth/base.py and StepBudget in osd/economy/plan.py. */
typedef struct {
  const double *chances, *firsts, *edges; /* [depths, ranks, buckets], [depths], [buckets - 1] */
  const double *rounds, *calls;           /* [known] seconds by rows; [priced] seconds of a call by nodes */
  int64_t depths, ranks, buckets, known, priced, levels, children, rows, room;
  double rho; /* value of a second, in tokens */
} Paying;

/* Token that may become a node; `node` is the number of the node, -1 before. */
typedef struct {
  double chance, estimate;
  int64_t column;
  int32_t row, parent, depth, node;
} Candidate;

/* All candidates in descending order of their chances; on ties the earlier candidate comes first. */
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

static void add_candidate(Pool *pool, Candidate added) {
  int64_t at = pool->count++;
  for (; at && pool->all[at - 1].chance < added.chance; at--) pool->all[at] = pool->all[at - 1];
  pool->all[at] = added;
}

/* Return the number of first candidates that pay, see StepBudget.best. */
static int64_t paying_count(const Paying *p, const Pool *pool) {
  const int64_t count = pool->count < p->room ? pool->count : p->room;
  double gain = 0, best = -p->rho * p->rounds[p->rows];
  int64_t paying = 0;
  for (int64_t n = 1; n <= count; n++) {
    gain += pool->all[n - 1].chance;
    const double value = gain - p->rho * p->rounds[p->rows + n];
    if (value > best) best = value, paying = n;
  }
  return paying;
}

/* Make nodes of the candidates that pay, at most `room` [sequences] per tree. Writes the new nodes at `depth` to `level`
 * and returns their number. */
static int64_t take_nodes(const Paying *p, Pool *pool, const int32_t *room, int64_t *sizes, int64_t depth, Candidate *level) {
  const int64_t count = paying_count(p, pool);
  int64_t nodes = 0;
  for (Candidate *at = pool->all; at < pool->all + count; at++) {
    if (at->node >= 0 || sizes[at->row] >= room[at->row]) continue;
    at->node = (int32_t)sizes[at->row]++;
    pool->taken++;
    if (at->depth == depth) level[nodes++] = *at;
  }
  return nodes;
}

/* Move to the front of `level` the nodes whose first children are expected to give more than their expansion costs.
 * Returns their number. */
static int64_t worth_expanding(const Paying *p, const Pool *pool, Candidate *level, int64_t count, int64_t depth) {
  const int64_t last = p->known - 1, rows = p->rows + pool->taken < last ? p->rows + pool->taken : last;
  const double first = p->firsts[depth < p->depths ? depth : p->depths - 1];
  const double price = rows < last ? p->rho * (p->rounds[rows + 1] - p->rounds[rows]) : 0;
  double gain = 0, best = 0;
  int64_t expanded = 0;
  for (int64_t i = 1; i < count; i++) {
    const Candidate moved = level[i];
    int64_t at = i;
    for (; at && level[at - 1].chance * first < moved.chance * first; at--) level[at] = level[at - 1];
    level[at] = moved;
  }
  for (int64_t n = 1; n <= count; n++) {
    const double more = level[n - 1].chance * first - price;
    gain += more > 0 ? more : 0;
    const double value = gain - p->rho * p->calls[n < p->priced ? n : p->priced - 1];
    if (value > best) best = value, expanded = n;
  }
  return expanded;
}

#endif
