/* The most probable tokens of distributions, and the mass of all others: what a trace keeps of them. */
#include "common.h"
#include "team.h"

#define BLOCK 64

typedef struct {
  float value;
  int32_t id;
} Entry;

/* Put an entry into a heap of at most `most`, the least at its root, which leaves when the heap is full. */
static void push(Entry *heap, int *count, int most, Entry entry) {
  int at;
  if (*count < most) {
    for (at = (*count)++; at && heap[(at - 1) / 2].value > entry.value; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = entry;
    return;
  }
  if (!(entry.value > heap[0].value)) return;
  for (at = 0;;) {
    int child = 2 * at + 1;
    if (child >= most) break;
    if (child + 1 < most && heap[child + 1].value < heap[child].value) child++;
    if (heap[child].value >= entry.value) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = entry;
}

/* Take the least entry out. */
static Entry pop(Entry *heap, int *count) {
  const Entry least = heap[0], last = heap[--*count];
  int at = 0;
  for (int child; (child = 2 * at + 1) < *count; at = child) {
    if (child + 1 < *count && heap[child + 1].value < heap[child].value) child++;
    if (heap[child].value >= last.value) break;
    heap[at] = heap[child];
  }
  heap[at] = last;
  return least;
}

/* The largest of x; `sound` becomes 0 when one of them is not a number. */
static float largest(const float *x, int64_t count, int *sound) {
  __m256 most = _mm256_set1_ps(-INFINITY), unordered = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 values = _mm256_loadu_ps(x + i);
    most = _mm256_max_ps(values, most);
    unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  }
  float lanes[8], value = -INFINITY;
  _mm256_storeu_ps(lanes, most);
  for (int lane = 0; lane < 8; lane++) value = lanes[lane] > value ? lanes[lane] : value;
  *sound &= !_mm256_movemask_ps(unordered);
  for (; i < count; i++) {
    value = x[i] > value ? x[i] : value;
    *sound &= x[i] == x[i];
  }
  return value;
}

/* The sum of exp(x - most), for which x <= most. */
static float mass(const float *x, int64_t count, float most) {
  __m256 sum = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    sum = _mm256_add_ps(sum, exp_nonpositive(_mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(most))));
  float rest = 0;
  for (; i < count; i++) rest += expf(x[i] - most);
  return sum8(sum) + rest;
}

/* One row. The k largest values lie in the k blocks whose largest are the largest: no others are looked through. */
static void top(const float *x, int64_t vocabulary, int k, Entry *blocks, Entry *heap, int64_t *ids, float *logp,
                float *tail) {
  int found = 0, kept = 0, sound = 1;
  for (int64_t start = 0; start < vocabulary; start += BLOCK) {
    const int64_t count = vocabulary - start < BLOCK ? vocabulary - start : BLOCK;
    push(blocks, &found, k, (Entry){largest(x + start, count, &sound), (int32_t)start});
  }
  float most = -INFINITY;
  for (int b = 0; b < found; b++) most = blocks[b].value > most ? blocks[b].value : most;
  double total = sound ? 0 : NAN;
  for (int64_t start = 0; start < vocabulary; start += BLOCK)
    total += mass(x + start, vocabulary - start < BLOCK ? vocabulary - start : BLOCK, most);
  for (int b = 0; b < found; b++)
    for (int64_t i = blocks[b].id; i < blocks[b].id + BLOCK && i < vocabulary; i++)
      if (kept < k || x[i] > heap[0].value) push(heap, &kept, k, (Entry){x[i], (int32_t)i});
  double told = 0;
  for (int place = k; place--;) {
    const Entry entry = pop(heap, &kept);
    ids[place] = entry.id;
    logp[place] = (float)(entry.value - most - log(total));
    told += exp(logp[place]);
  }
  *tail = (float)log(told < 1 - 1e-12 ? 1 - told : 1e-12);
}

/* Of `count` rows of logits [.., vocabulary], by their numbers: ids and logp [count, k] from the most probable on, and
 * the log-mass of the others tail [count]. k is at most the vocabulary. */
int osd_top(const float *logits, const int64_t *rows, int64_t count, int64_t vocabulary, int64_t k, int64_t *ids,
            float *logp, float *tail, int threads) {
  const int64_t space = 2 * k * (int64_t)sizeof(Entry);
  if (threads > count) threads = (int)count;
  if (threads < 1) return 0;
  char *scratch = malloc((size_t)(threads * space));
  if (!scratch) return 1;
  Team team = {0};
#pragma omp parallel num_threads(threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    Entry *blocks = (Entry *)(scratch + m.me * space);
    for (int64_t r; (r = take(&m, count)) >= 0;)
      top(logits + rows[r] * vocabulary, vocabulary, (int)k, blocks, blocks + k, ids + r * k, logp + r * k, tail + r);
  }
  free(scratch);
  return 0;
}
