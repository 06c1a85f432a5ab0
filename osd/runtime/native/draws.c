/* Verification of drafts against the target's logits: draw the next token and look for it in the tree, or accept a token
 * that the drafter drew with the probability that the target allows.
 */
#include "common.h"
#include "noise.h"
#include "team.h"

#define BLOCK 256

/* Sequence to verify: the row of the logits after its root, which the rows of its nodes follow; the number of nodes; and
 * the keys of its draws. */
typedef struct {
  int64_t row, nodes;
  uint64_t seed, step, first;
} Drawing;

/* For the root and each node of all sequences, concatenated: the drawn child, -1 if there is none, and the distribution
 * that it was drawn from, without the chosen children. */
typedef struct {
  const int64_t *child; /* [entries] a node of the sequence */
  const int64_t *ids;   /* [entries, KEPT] */
  const float *q;       /* [entries, KEPT], 0 where there is no token */
} Drafted;

/* Distribution of a row: exp((x - most) * scale) / total, 0 where the logarithm of the weight is below `least`. */
typedef struct {
  const float *x;
  int64_t count;
  float scale, least, most;
  double total;
  double *sums; /* [count / BLOCK + 1] cumulative sum at the end of each block */
} Target;

INLINE Vector weights_of(const Target *p, int64_t i) {
  const Vector delta = (load(p->x + i) - p->most) * p->scale;
  return choose(delta >= p->least, exp_nonpositive(delta), all(0));
}

static float weight_of(const Target *p, int64_t i) {
  const float delta = (p->x[i] - p->most) * p->scale;
  return delta >= p->least ? expf(delta) : 0;
}

static void read_target(Target *p) {
  Vector best = all(-INFINITY);
  int64_t i = 0;
  for (; i + WIDTH <= p->count; i += WIDTH) best = larger(load(p->x + i), best);
  p->most = largest_of(best);
  for (; i < p->count; i++) p->most = p->x[i] > p->most ? p->x[i] : p->most;
  p->total = 0;
  for (int64_t start = 0; start < p->count; start += BLOCK) {
    const int64_t end = start + BLOCK < p->count ? start + BLOCK : p->count;
    Vector sum = all(0);
    float rest = 0;
    for (i = start; i + WIDTH <= end; i += WIDTH) sum += weights_of(p, i);
    for (; i < end; i++) rest += weight_of(p, i);
    p->sums[start / BLOCK] = p->total += sum_of(sum) + rest;
  }
}

/* Return the token at which the cumulative weight reaches `left`, without the tokens `off`; -1 if no token has weight. */
static int64_t reach(const Target *p, double left, const int64_t *off, int offs) {
  const int64_t blocks = (p->count + BLOCK - 1) / BLOCK;
  double gone[KEPT];
  for (int j = 0; j < offs; j++) gone[j] = weight_of(p, off[j]);
  int64_t last = -1; /* last token with a weight: by rounding `left` may exceed the sum */
  for (int64_t block = 0; block < blocks; block++) {
    double here = p->sums[block] - (block ? p->sums[block - 1] : 0);
    for (int j = 0; j < offs; j++)
      if (off[j] / BLOCK == block) here -= gone[j];
    if (left >= here && block + 1 < blocks && p->sums[block] < p->total) {
      left -= here;
      continue;
    }
    for (int64_t i = block * BLOCK; i < p->count && i < (block + 1) * BLOCK; i++) {
      int out = 0;
      for (int j = 0; j < offs; j++) out |= off[j] == i;
      const float weight = out ? 0 : weight_of(p, i);
      if (weight > 0) last = i;
      if ((left -= weight) < 0) return last;
    }
    if (last >= 0) return last;
  }
  return last;
}

/* Return a token drawn from the positive part of p - q'. */
static int64_t residual(const Target *p, const int64_t *ids, const float *q, double u) {
  double left[KEPT], off = 0, more = 0;
  int count = 0;
  for (; count < KEPT && q[count] > 0; count++) {
    const double weight = weight_of(p, ids[count]);
    off += weight;
    more += left[count] = fmax(0, weight - q[count] * p->total);
  }
  double place = u * (p->total - off + more);
  for (int i = 0; i < count; i++)
    if ((place -= left[i]) < 0) return ids[i];
  return reach(p, place, ids, count);
}

/* Write for each of `count` sequences the accepted path of its tree, its length, and the token after it.
 *
 * Tokens, parents and paths of all sequences' nodes are concatenated. `scales` [count] are 1 / temperature. `floors` [count]
 * are the least logarithms of a probability, relative to the largest. A drawn child in `drafted`, which may be null, is
 * accepted with probability p / q', see osd/verification/descent.py. Returns 1 if an allocation failed, 2 if logits
 * [.., vocabulary] contain NaN. */
int osd_follow_draws(const float *logits, int64_t vocabulary, int64_t count, const Drawing *drawings,
                     const Drafted *drafted, const int64_t *tokens, const int64_t *parents, const float *scales,
                     const float *floors, int64_t *path, int64_t *accepted, int64_t *token, int threads) {
  const int64_t blocks = vocabulary / BLOCK + 1;
  if (threads > count) threads = (int)count;
  if (threads < 1) return 0;
  double *space = malloc((size_t)(threads * blocks) * sizeof(double));
  int64_t *starts = malloc((size_t)count * sizeof(int64_t)); /* index of each sequence's first node */
  if (!space || !starts) {
    free(space);
    free(starts);
    return 1;
  }
  for (int64_t s = 0, start = 0; s < count; start += drawings[s++].nodes) starts[s] = start;
  int failed = 0;
  Team team = {0};
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    for (int64_t s; (s = take(&m, count)) >= 0;) {
      const Drawing *sequence = drawings + s;
      const int64_t *drafted_tokens = tokens + starts[s], *above = parents + starts[s];
      int64_t at = 0; /* 0 for the root, 1 + i for node i */
      for (accepted[s] = 0;;) {
        const float *row = logits + (sequence->row + at) * vocabulary;
        Target p = {row, vocabulary, scales[s], floors[s], 0, 0, space + m.me * blocks};
        const int64_t entry = starts[s] + s + at, child = drafted ? drafted->child[entry] : -1;
        int64_t next = -1;
        read_target(&p);
        if (child >= 0) {
          const int64_t *ids = drafted->ids + entry * KEPT;
          const float *q = drafted->q + entry * KEPT;
          int y = 0;
          while (ids[y] != drafted_tokens[child]) y++;
          const double chance = weight_of(&p, ids[y]) / (q[y] * p.total);
          if (number(sequence->seed, sequence->step, ACCEPT, (uint64_t)child) < chance)
            next = child;
          else
            token[s] = residual(&p, ids, q, number(sequence->seed, sequence->step, RESIDUAL, (uint64_t)at));
        } else {
          const double u = number(sequence->seed, sequence->step, BONUS, sequence->first + (uint64_t)accepted[s]);
          token[s] = reach(&p, u * p.total, NULL, 0);
        }
        if (next < 0 && token[s] < 0) failed = 2;
        for (int64_t i = at; i < sequence->nodes && next < 0; i++)
          if (above[i] == at - 1 && drafted_tokens[i] == token[s]) next = i;
        if (next < 0) break;
        path[starts[s] + accepted[s]++] = next;
        at = next + 1;
      }
    }
  }
  free(space);
  free(starts);
  return failed;
}
