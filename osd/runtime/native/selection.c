/* Token-level selection of keys and values (Wu et al., "TokenSelect", EMNLP 2025, arXiv 2411.02886).
 *
 * In a long context a row reads the first tokens, the last tokens, and between them the `top` tokens with the most votes:
 * each head votes by the softmax of its unscaled scores. The rows of a slot share one selection, made for their mean query.
 * It is reused until later queries have another direction, or the number of local tokens has halved or doubled.
 */
#include "selection.h"

#include "scores.h"

#define CHUNK 1024  /* candidates that are scored together */
#define TOGETHER 12 /* queries that share a read of a chunk of keys */
#define SPARE 64    /* floats written beyond the end */
#define SLICES 4    /* of the copies for a head */

static int64_t rounded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

static int64_t chunks_of(const Span *s) { return (s->candidates + CHUNK - 1) / CHUNK; }

int osd_make_chooser(Chooser *c, const Rows *rows, const Attention *shape, int threads) {
  const Selection *sel = rows->selection;
  *c = (Chooser){.selection = sel};
  if (!sel) return 0;
  const int64_t far = sel->initial + sel->top, across = padded(shape->dim);
  c->spans = malloc(sizeof(Span) * (size_t)rows->count);
  c->owners = malloc(sizeof(int32_t) * (size_t)rows->count);
  if (!c->spans || !c->owners) return 1;
  int64_t bytes = 0, some = 0;
  for (int64_t row = 0; row < rows->count; row++) {
    if (!row || rows->slots[row] != rows->slots[row - 1])
      c->spans[c->count++] = (Span){.row = row, .slot = rows->slots[row], .first = INT64_MAX};
    Span *s = c->spans + c->count - 1;
    s->count++;
    c->owners[row] = (int32_t)(c->count - 1);
    if (rows->visible[row] < s->first) s->first = rows->visible[row];
    if (rows->stores[row] < s->first) s->first = rows->stores[row];
  }
  for (Span *s = c->spans; s < c->spans + c->count; s++) {
    if (s->first <= far + sel->local) continue;
    some = 1;
    s->far = far;
    s->candidates = s->first - sel->local - sel->initial;
    s->stride = rounded(s->candidates, SPARE) + SPARE;
    bytes += 4 * (shape->heads * (across + s->stride + 2 * chunks_of(s)) + s->stride + 4 * SPARE);
  }
  if (!some) {
    c->count = 0;
    return 0;
  }
  c->scratch_size = 4 * rounded(32 * across + CHUNK * shape->dim + (sel->compact ? CHUNK * shape->dim : 0), SPARE);
  if (posix_memalign((void **)&c->all, 64, (size_t)(bytes + c->scratch_size * threads))) return 1;
  char *at = c->all;
  for (Span *s = c->spans; s < c->spans + c->count; s++) {
    if (!s->far) continue;
    s->query = (float *)at;
    s->scores = s->query + rounded(shape->heads * across, SPARE);
    s->votes = s->scores + shape->heads * s->stride;
    s->tops = s->votes + s->stride;
    s->sums = s->tops + rounded(shape->heads * chunks_of(s), SPARE);
    at = (char *)(s->sums + rounded(shape->heads * chunks_of(s), SPARE));
  }
  c->scratch = at;
  return 0;
}

void osd_free_chooser(Chooser *c) {
  free(c->spans);
  free(c->owners);
  free(c->all);
}

/* to [dim] = from rotated by the angles of `cosines` and `sines` [dim / 2], or backwards if `way` is -1. */
INLINE void turn(const float *from, float *to, const float *cosines, const float *sines, int64_t dim, const float way) {
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; d++) {
    const float first = from[d], second = from[half + d], sine = way * sines[d];
    to[d] = first * cosines[d] - second * sine;
    to[half + d] = second * cosines[d] + first * sine;
  }
}

/* Decide whether the rows of a span reuse their last selection; `mean` is a buffer of [heads, dim]. */
static void look(const Selection *sel, Span *s, const Attention *a, const Rows *rows, const void *query, int64_t layer,
                 float *mean) {
  const int64_t dim = a->dim, half = dim / 2, width = a->heads * dim, across = padded(dim);
  float *wide = mean + width, *back = wide + dim;
  memset(mean, 0, (size_t)width * 4);
  for (int64_t row = s->row; row < s->row + s->count; row++) {
    const float *cosines = sel->cosines + rows->positions[row] * half, *sines = sel->sines + rows->positions[row] * half;
    for (int64_t h = 0; h < a->heads; h++) {
      for (int64_t d = 0; d < dim; d++) wide[d] = read_element(query, (row * a->heads + h) * dim + d, a->dtype);
      turn(wide, back, cosines, sines, dim, -1);
      for (int64_t d = 0; d < dim; d++) mean[h * dim + d] += back[d];
    }
  }
  const int64_t at = layer * sel->slots + s->slot, begin = sel->begins[at], window = s->first - begin;
  float *before = sel->queries + at * width, product = 0, norm = 0, norm_before = 0;
  for (int64_t i = 0; i < width; i++) {
    mean[i] /= (float)s->count;
    product += mean[i] * before[i];
    norm += mean[i] * mean[i];
    norm_before += before[i] * before[i];
  }
  s->fresh = !(begin > 0 && 2 * window >= sel->local && window <= 2 * sel->local &&
               product >= sel->threshold * sqrtf(norm) * sqrtf(norm_before));
  __atomic_add_fetch(sel->counts + (s->fresh ? 0 : 1), 1, __ATOMIC_RELAXED);
  s->begin = s->fresh ? s->first - sel->local : begin;
  if (!s->fresh) return;
  memcpy(before, mean, (size_t)width * 4);
  sel->begins[at] = (int32_t)s->begin;
  /* In a compact context every candidate has the distance of the first local token. */
  const int64_t position = sel->compact ? sel->local : rows->positions[s->row];
  memset(s->query, 0, (size_t)(a->heads * across) * 4);
  for (int64_t h = 0; h < a->heads; h++)
    turn(mean + h * dim, s->query + h * across, sel->cosines + position * half, sel->sines + position * half, dim, 1);
}

/* Score a chunk of candidates by the queries of one key head, as exp(score - the largest of the chunk). */
static void score_chunk(const Selection *sel, const Span *s, const Attention *a, int64_t kv_head, int64_t chunk,
                        float *scratch) {
  const int64_t dim = a->dim, group = a->heads / a->kv_heads, across = padded(dim), chunks = chunks_of(s);
  const int64_t first = chunk * CHUNK, low = sel->initial + first, element = a->cache_dtype == BFLOAT16 ? 2 : 4;
  const int64_t count = s->candidates - first < CHUNK ? s->candidates - first : CHUNK;
  const int64_t row = (s->slot * a->kv_heads + kv_head) * a->places + low;
  const char *keys = (const char *)a->keys + row * dim * element;
  float *wide = scratch, *turned = wide + 32 * across, *from = turned + CHUNK * dim;
  int dtype = a->cache_dtype;
  if (sel->compact) {
    for (int64_t i = 0; i < count; i++) {
      for (int64_t d = 0; d < dim; d++) from[d] = read_element(keys, i * dim + d, dtype);
      const int64_t at = (low + i) * (dim / 2);
      turn(from, turned + i * dim, sel->cosines + at, sel->sines + at, dim, -1);
    }
    keys = (const char *)turned;
    dtype = FLOAT32;
  }
  for (int64_t g = 0; g < group; g += TOGETHER) {
    const int64_t head = kv_head * group + g, some = group - g < TOGETHER ? group - g : TOGETHER;
    osd_score(s->query + head * across, some, keys, count, dim, s->scores + head * s->stride + first, s->stride, wide,
              dtype);
  }
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
    float *scores = s->scores + head * s->stride + first;
    const int64_t whole = padded(count);
    for (int64_t i = count; i < whole; i++) scores[i] = -INFINITY;
    s->sums[head * chunks + chunk] = exponentials(scores, whole, s->tops + head * chunks + chunk);
  }
}

/* Sum the votes of all heads for the candidates of one chunk. */
static void count_votes(const Span *s, int64_t heads, int64_t chunk) {
  const int64_t chunks = chunks_of(s), first = chunk * CHUNK;
  const int64_t count = s->candidates - first < CHUNK ? s->candidates - first : CHUNK;
  for (int64_t head = 0; head < heads; head++) {
    const float *tops = s->tops + head * chunks, *sums = s->sums + head * chunks;
    float best = -INFINITY, total = 0;
    for (int64_t i = 0; i < chunks; i++) best = tops[i] > best ? tops[i] : best;
    for (int64_t i = 0; i < chunks; i++) total += sums[i] * expf(tops[i] - best);
    const float share = expf(tops[chunk] - best) / total;
    const float *scores = s->scores + head * s->stride + first;
    float *votes = s->votes + first;
    for (int64_t i = 0; i < count; i += WIDTH)
      put(votes + i, head ? load(votes + i) + share * load(scores + i) : share * load(scores + i));
  }
}

static uint32_t bits_of(float vote) {
  uint32_t bits;
  memcpy(&bits, &vote, 4);
  return bits & 0x7fffffffu;
}

/* Write to chosen [top], ascending, the places with the most votes, the earlier of equal ones; vote 0 has place `first`.
 * Votes are not negative, so their bits have the same order as their values. */
static void take_top(const float *votes, int64_t count, int64_t top, int32_t first, int32_t *chosen) {
  static const int shifts[3] = {20, 10, 0}, widths[3] = {11, 10, 10};
  uint32_t least = 0;
  int64_t left = top; /* number to take of the votes with the upper bits of `least` */
  for (int pass = 0; pass < 3; pass++) {
    const int shift = shifts[pass];
    const uint32_t mask = (1u << widths[pass]) - 1;
    int32_t counts[2][2048] = {{0}}; /* two tables: adjacent votes are often equal, and their increments would wait */
    for (int64_t i = 0; i < count; i++) {
      const uint32_t bits = bits_of(votes[i]);
      if (pass && (bits ^ least) >> (shift + widths[pass])) continue;
      counts[i & 1][(bits >> shift) & mask]++;
    }
    uint32_t bin = mask;
    while (bin && counts[0][bin] + counts[1][bin] < left) {
      left -= counts[0][bin] + counts[1][bin];
      bin--;
    }
    least |= bin << shift;
  }
  for (int64_t i = 0, taken = 0; i < count && taken < top; i++) {
    const uint32_t bits = bits_of(votes[i]);
    const int equal = bits == least;
    chosen[taken] = first + (int32_t)i;
    taken += (bits > least) | (equal & (left > 0));
    left -= equal;
  }
}

/* Return the offset of the copies for a key head. */
static int64_t copies_of(const Selection *sel, const Span *s, const Attention *a, int64_t layer, int64_t kv_head) {
  return ((layer * sel->slots + s->slot) * a->kv_heads + kv_head) * s->far * a->dim *
         (a->cache_dtype == BFLOAT16 ? 2 : 4);
}

/* Copy a slice of the selected keys and values for one key head; with `compact`, keys are rotated to their new positions. */
static void gather(const Selection *sel, const Span *s, const Attention *a, int64_t layer, int64_t kv_head, int64_t slice,
                   float *wide) {
  const int64_t dim = a->dim, row = dim * (a->cache_dtype == BFLOAT16 ? 2 : 4);
  const int32_t *chosen = sel->chosen + (layer * sel->slots + s->slot) * sel->top;
  const int64_t before = (s->slot * a->kv_heads + kv_head) * a->places;
  const char *keys = (const char *)a->keys + before * row, *values = (const char *)a->values + before * row;
  char *copied_keys = sel->keys + copies_of(sel, s, a, layer, kv_head);
  char *copied_values = sel->values + copies_of(sel, s, a, layer, kv_head);
  for (int64_t i = s->far * slice / SLICES; i < s->far * (slice + 1) / SLICES; i++) {
    const int64_t place = i < sel->initial ? i : chosen[i - sel->initial];
    const int64_t moved = sel->compact ? s->begin - s->far - (place - i) : 0;
    memcpy(copied_values + i * row, values + place * row, (size_t)row);
    if (moved) {
      for (int64_t d = 0; d < dim; d++) wide[d] = read_element(keys, place * dim + d, a->cache_dtype);
      turn(wide, wide + dim, sel->cosines + moved * (dim / 2), sel->sines + moved * (dim / 2), dim, 1);
      for (int64_t d = 0; d < dim; d++) write_element(copied_keys, i * dim + d, wide[dim + d], a->cache_dtype);
    } else {
      memcpy(copied_keys + i * row, keys + place * row, (size_t)row);
    }
  }
}

void osd_choose(const Member *m, Chooser *c, const Attention *a, const Rows *rows, const void *query, int64_t layer) {
  const Selection *sel = c->selection;
  float *scratch = (float *)(c->scratch + m->me * c->scratch_size);
  int64_t scored = 0, counted = 0;
  for (int64_t item; (item = take(m, c->count)) >= 0;)
    if (c->spans[item].far) look(sel, c->spans + item, a, rows, query, layer, scratch);
  meet(m);
  for (int64_t i = 0; i < c->count; i++)
    if (c->spans[i].far && c->spans[i].fresh) {
      counted += chunks_of(c->spans + i);
      scored += chunks_of(c->spans + i) * a->kv_heads;
    }
  if (!counted) return;
  for (int64_t item; (item = take(m, scored)) >= 0;)
    for (Span *s = c->spans;; s++) {
      const int64_t chunks = s->far && s->fresh ? chunks_of(s) * a->kv_heads : 0;
      if (item < chunks) {
        score_chunk(sel, s, a, item / chunks_of(s), item % chunks_of(s), scratch);
        break;
      }
      item -= chunks;
    }
  meet(m);
  for (int64_t item; (item = take(m, counted)) >= 0;)
    for (Span *s = c->spans;; s++) {
      const int64_t chunks = s->far && s->fresh ? chunks_of(s) : 0;
      if (item < chunks) {
        count_votes(s, a->heads, item);
        break;
      }
      item -= chunks;
    }
  meet(m);
  for (int64_t item; (item = take(m, c->count)) >= 0;) {
    const Span *s = c->spans + item;
    if (s->far && s->fresh)
      take_top(s->votes, s->candidates, sel->top, (int32_t)sel->initial,
               sel->chosen + (layer * sel->slots + s->slot) * sel->top);
  }
  meet(m);
  for (int64_t item; (item = take(m, c->count * a->kv_heads * SLICES)) >= 0;) {
    const Span *s = c->spans + item / (a->kv_heads * SLICES);
    if (s->far && s->fresh) gather(sel, s, a, layer, item / SLICES % a->kv_heads, item % SLICES, scratch);
  }
  meet(m);
}

Far osd_far(const Chooser *c, const Attention *a, const Block *block, int64_t layer) {
  if (!c->count) return (Far){0};
  const Span *s = c->spans + c->owners[block->row];
  if (!s->far) return (Far){0};
  const int64_t at = copies_of(c->selection, s, a, layer, block->kv_head);
  return (Far){c->selection->keys + at, c->selection->values + at, s->far, s->begin};
}
