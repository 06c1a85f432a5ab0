/* The most probable tokens of distributions, and the mass of the rest, for traces. */
#include "common.h"
#include "team.h"

#define STEPS 16 /* vectors of a group, which are reduced lane by lane */
#define GROUP (STEPS * WIDTH)
#define CHUNK (16 * GROUP) /* numbers that are read twice while they are in the first-level cache */

typedef struct {
  float value;
  int32_t id;
} Entry;

/* Return whether a comes after b in descending order; of equal values the lower id comes first. */
static int after(Entry a, Entry b) { return a.value < b.value || (a.value == b.value && a.id > b.id); }

/* Add an entry to a heap of at most `most` entries with the last one at its root; a full heap drops the root. */
static void push(Entry *heap, int *count, int most, Entry entry) {
  int at;
  if (*count < most) {
    for (at = (*count)++; at && after(entry, heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = entry;
    return;
  }
  if (!after(heap[0], entry)) return;
  for (at = 0;;) {
    int child = 2 * at + 1;
    if (child >= most) break;
    if (child + 1 < most && after(heap[child + 1], heap[child])) child++;
    if (!after(heap[child], entry)) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = entry;
}

/* Remove and return the root. */
static Entry pop(Entry *heap, int *count) {
  const Entry taken = heap[0], end = heap[--*count];
  int at = 0;
  for (int child; (child = 2 * at + 1) < *count; at = child) {
    if (child + 1 < *count && after(heap[child + 1], heap[child])) child++;
    if (!after(heap[child], end)) break;
    heap[at] = heap[child];
  }
  heap[at] = end;
  return taken;
}

/* Collect the k lanes of groups of x [start, end) with the largest maxima. Returns the largest of all numbers, NaN if any
 * is NaN. */
static float lanes_of(const float *x, int64_t start, int64_t end, int k, Entry *lanes, int *count) {
  Vector most = all(-INFINITY);
  Mask unordered = {0};
  int64_t i = start;
  for (; i + GROUP <= end; i += GROUP) {
    Vector best = all(-INFINITY);
    for (int step = 0; step < STEPS; step++) {
      const Vector values = load(x + i + step * WIDTH);
      best = larger(values, best);
      unordered |= values != values;
    }
    most = larger(best, most);
    if (*count == k && !any(best > lanes[0].value)) continue;
    for (int lane = 0; lane < WIDTH; lane++) push(lanes, count, k, (Entry){best[lane], (int32_t)(i + lane)});
  }
  float value = largest_of(most);
  int sound = !any(unordered);
  for (; i < end; i++) {
    value = x[i] > value ? x[i] : value;
    sound &= x[i] == x[i];
  }
  return sound ? value : NAN;
}

/* Return the sum of exp(x - most), where x <= most. */
static float mass(const float *x, int64_t count, float most) {
  Vector sums[2] = {all(0), all(0)};
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) sums[i / WIDTH % 2] += exp_nonpositive(load(x + i) - most);
  float total = sum_of(sums[0] + sums[1]);
  for (; i < count; i++) total += expf(x[i] - most);
  return total;
}

/* Compute one row. The k largest numbers are in the k lanes with the largest maxima, so only these are searched. */
static void top(const float *x, int64_t vocabulary, int k, Entry *lanes, Entry *heap, int64_t *ids, float *logp,
                float *tail) {
  int lane_count = 0, kept = 0;
  float most = -INFINITY;
  double total = 0; /* of exp(x - most) */
  for (int64_t start = 0; start < vocabulary; start += CHUNK) {
    const int64_t end = start + CHUNK < vocabulary ? start + CHUNK : vocabulary;
    const float here = lanes_of(x, start, end, k, lanes, &lane_count), before = most;
    if (!(here <= before)) most = here;
    if (most == -INFINITY) continue;
    total = total * exp((double)before - most) + mass(x + start, end - start, most);
  }
  for (int lane = 0; lane < lane_count; lane++)
    for (int step = 0; step < STEPS; step++) {
      const int32_t i = lanes[lane].id + step * WIDTH;
      if (kept < k || x[i] >= heap[0].value) push(heap, &kept, k, (Entry){x[i], i});
    }
  for (int64_t i = vocabulary / GROUP * GROUP; i < vocabulary; i++) push(heap, &kept, k, (Entry){x[i], (int32_t)i});
  double covered = 0;
  for (int place = k; place--;) {
    const Entry entry = pop(heap, &kept);
    ids[place] = entry.id;
    logp[place] = (float)(entry.value - (double)most - log(total));
    covered += exp(logp[place]);
  }
  *tail = (float)log(covered < 1 - 1e-12 ? 1 - covered : 1e-12);
}

/* Write the k most probable tokens of one row; k is at most KEPT. */
void osd_few(const float *row, int64_t vocabulary, int k, int64_t *ids, float *logp) {
  Entry lanes[KEPT], heap[KEPT];
  float tail;
  top(row, vocabulary, k, lanes, heap, ids, logp, &tail);
}

/* Write for `count` rows of logits [.., vocabulary], given by number, ids and logp [count, k] in descending order, and
 * tail [count], the log-mass of the rest. k is at most the vocabulary. Returns 1 if the allocation failed. */
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
    Entry *lanes = (Entry *)(scratch + m.me * space);
    for (int64_t r; (r = take(&m, count)) >= 0;)
      top(logits + rows[r] * vocabulary, vocabulary, (int)k, lanes, lanes + k, ids + r * k, logp + r * k, tail + r);
  }
  free(scratch);
  return 0;
}
