/* Draw from the target's distributions along draft trees, and go on as long as a tree has what was drawn. */
#include "common.h"
#include "team.h"

#define BLOCK 256

/* exp(x - most) of a vector of scaled logits, 0 where that is less than the least that counts. */
INLINE Vector weights_of(const float *x, float scale, float most, float least) {
  const Vector delta = (load(x) - most) * scale;
  return choose(delta >= least, exp_nonpositive(delta), all(0));
}

INLINE float weight_of(float x, float scale, float most, float least) {
  const float delta = (x - most) * scale;
  return delta >= least ? expf(delta) : 0;
}

/* One token of x [count], by inversion of the distribution function at u; `sums` [count / BLOCK + 1] is space. */
static int64_t draw(const float *x, int64_t count, float scale, float least, double u, double *sums) {
  Vector best = all(-INFINITY);
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) best = larger(load(x + i), best);
  float most = largest_of(best);
  for (; i < count; i++) most = x[i] > most ? x[i] : most;
  double total = 0;
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t end = start + BLOCK < count ? start + BLOCK : count;
    Vector sum = all(0);
    float rest = 0;
    for (i = start; i + WIDTH <= end; i += WIDTH) sum += weights_of(x + i, scale, most, least);
    for (; i < end; i++) rest += weight_of(x[i], scale, most, least);
    sums[start / BLOCK] = total += sum_of(sum) + rest;
  }
  int64_t block = 0;
  while (sums[block] <= u * total && sums[block] < total) block++;
  double left = u * total - (block ? sums[block - 1] : 0);
  int64_t found = -1; /* rounding may leave something after the last token of the block that has any weight */
  for (i = block * BLOCK; i < count && i < (block + 1) * BLOCK; i++) {
    const float weight = weight_of(x[i], scale, most, least);
    if (weight > 0) found = i;
    if ((left -= weight) < 0) break;
  }
  return found;
}

enum { BONUS = 4 }; /* See osd/speculation/noise.py, whose numbers these are. */

static uint64_t finalised(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* A sequence: the row of the logits after its root, those after its nodes follow; its nodes; and the keys of its draws. */
typedef struct {
  int64_t row, nodes;
  uint64_t seed, step, first;
} Drawing;

/* Uniform in (0, 1), for the token at a depth. */
static double number(const Drawing *one, int64_t depth) {
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t base = finalised(finalised(finalised(one->seed + golden)) + one->step * golden);
  const uint64_t stream = finalised(base ^ BONUS * 0xbf58476d1ce4e5b9u);
  return ((double)(finalised(stream + (one->first + (uint64_t)depth + 1) * golden) >> 12) + 0.5) * 0x1p-52;
}

/* Of each of `count` sequences the path that the draws keep in its tree, how long that is, and the last draw.
 *
 * Tokens, parents and paths of all nodes stand one behind the other. `scales` [count] are one over the temperatures,
 * `floors` [count] the least logarithm of a probability, in those of the largest. Returns 1 without memory, 2 where
 * logits [.., vocabulary] are not numbers. */
int osd_naive(const float *logits, int64_t vocabulary, int64_t count, const Drawing *drawings, const int64_t *tokens,
              const int64_t *parents, const float *scales, const float *floors, int64_t *path, int64_t *accepted,
              int64_t *token, int threads) {
  const int64_t blocks = vocabulary / BLOCK + 1;
  if (threads > count) threads = (int)count;
  if (threads < 1) return 0;
  double *space = malloc((size_t)(threads * blocks) * sizeof(double));
  int64_t *starts = malloc((size_t)count * sizeof(int64_t)); /* of each sequence's nodes */
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
      const Drawing *one = drawings + s;
      int64_t at = 0, next; /* 0 is the root, 1 + i node i */
      for (accepted[s] = 0;; at = next) {
        const float *row = logits + (one->row + at) * vocabulary;
        token[s] = draw(row, vocabulary, scales[s], floors[s], number(one, accepted[s]), space + m.me * blocks);
        if (token[s] < 0) failed = 2;
        next = 0;
        for (int64_t i = at; i < one->nodes && !next; i++)
          if (parents[starts[s] + i] == at - 1 && tokens[starts[s] + i] == token[s]) next = i + 1;
        if (!next) break;
        path[starts[s] + accepted[s]++] = next - 1;
      }
    }
  }
  free(space);
  free(starts);
  return failed;
}
