/* The EAGLE drafter: one step for the nodes of any trees, or whole greedy chains in one call.
 *
 * Its layer's attention reads [norm(embedded), norm(features)]; the input_norm of the layer is that of the features.
 */
#include <float.h>

#include "layer.h"

#define JUDGE_BLOCKS 3

/* What a drafter has beside its layer. */
typedef struct {
  const float *embedding_norm, *final_norm, *tap_norm; /* [hidden], [hidden], [taps * hidden] */
  const void *fuse, *head;                             /* packed */
  const void *embedding;                               /* [target vocabulary, hidden] of embedding_dtype */
  const float *cosines, *sines;                        /* [places, dim] of the rotary embedding */
  const int64_t *draft_ids;                            /* [vocabulary] */
  int64_t vocabulary, taps;
  int32_t embedding_dtype;
} Eagle;

/* An acceptance head, see osd.drafters.acceptance_head: blocks x + silu(W x + b), then odds [hidden] . x + bias. A chain
 * ends when one of the tokens that the drafter has read is rejected more probably than `most`. */
typedef struct {
  Linear blocks[JUDGE_BLOCKS];
  const float *odds;
  float bias, most;
} Judge;

/* `count` sequences that draft greedily. Sequence b continues from its fresh[b] pending pairs (its next tokens and the
 * hidden states before them), which go to the places behind lengths[b]. */
typedef struct {
  const int32_t *slots, *lengths, *fresh, *limits; /* [count]; without a limit, no pairs and no draft */
  const int64_t *tokens;                           /* [pairs] */
  const void *hidden;                              /* [pairs, taps * hidden] of hidden_dtype */
  int64_t *drafted;                                /* [count, levels] target ids */
  int32_t *sizes;                                  /* [count] */
  float *logits;                                   /* [count, levels, vocabulary] */
  int64_t count, pairs, levels;
  const Judge *judge; /* or null */
  float floor;        /* a chain ends after a token of less probability */
  int32_t hidden_dtype;
} Chains;

/* x [rows, 2 * hidden] = [norm(embedded), norm(features)]. */
static void join(const Layer *layer, const Shape *shape, const Eagle *e, const float *embedded, const float *features,
                 float *x, int64_t rows) {
  const int64_t h = shape->hidden;
  rms_norm(embedded, e->embedding_norm, x, rows, h, 2 * h, shape->eps, FLOAT32);
  rms_norm(features, layer->input_norm, x + h, rows, h, 2 * h, shape->eps, FLOAT32);
}

/* One step. features [rows, hidden] become the next ones in place; logits [asked, vocabulary] are those after the rows
 * last[0..asked). */
int osd_eagle(const Layer *layer, const Shape *shape, const Eagle *e, const Rows *r, const float *embedded,
              float *features, const int64_t *last, int64_t asked, float *logits) {
  const int64_t h = shape->hidden, rows = r->count;
  Space s;
  if (!rows) return 0;
  if (make_space(&s, shape, r, rows > asked ? rows : asked, 2 * h)) return 1;
  const Linear head = {e->head, NULL, h, e->vocabulary, shape->weight_dtype};
  Team team = {0};
#pragma omp parallel num_threads(shape->threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    const Own own = own_space(&m, &s);
    join(layer, shape, e, embedded, features, own.normed, rows);
    run_layer(&m, layer, 0, shape, r, &s, features, own, 2 * h, NULL);
    to_logits(&m, shape, e->final_norm, &head, features, last, asked, own, logits);
  }
  free_space(&s);
  return 0;
}

/* The rows of one level of the chains, and what is computed with them. */
typedef struct {
  char *all;
  float *embedded, *features, *logits, *judged, *odds; /* the last two of the chains that go on */
  double *unbroken;                                     /* [count] that all tokens read so far are accepted */
  int32_t *slots, *stores, *from, *visible;
  int64_t *positions, *last, *owners; /* of the chains that go on: their last row and their index */
  int64_t asked;
  Rows rows;
} Level;

static int make_level(Level *l, const Shape *shape, const Eagle *e, const Chains *c) {
  const int64_t h = shape->hidden, rows = c->pairs > c->count ? c->pairs : c->count;
  const int64_t judged = c->judge ? c->count * (h + 1) : 0;
  const int64_t floats = rows * 2 * h + c->count * e->vocabulary + judged;
  if (posix_memalign((void **)&l->all, 64, (size_t)(24 * c->count + 4 * floats + 24 * rows))) return 1;
  l->last = (int64_t *)l->all;
  l->owners = l->last + c->count;
  l->positions = l->owners + c->count;
  l->unbroken = (double *)(l->positions + rows);
  l->embedded = (float *)(l->unbroken + c->count);
  l->features = l->embedded + rows * h;
  l->logits = l->features + rows * h;
  l->judged = l->logits + c->count * e->vocabulary;
  l->odds = l->judged + (judged ? c->count * h : 0);
  l->slots = (int32_t *)(l->judged + judged);
  l->stores = l->slots + rows;
  l->from = l->stores + rows;
  l->visible = l->from + rows;
  l->rows = (Rows){e->cosines, e->sines, l->positions, l->slots, l->stores, l->from, l->visible, NULL, NULL, 0, 0, NULL};
  return 0;
}

static void add_row(Level *l, const Shape *shape, const Eagle *e, int32_t slot, int32_t place, int64_t token) {
  const int64_t r = l->rows.count++, h = shape->hidden;
  l->positions[r] = place;
  l->slots[r] = slot;
  l->stores[r] = place;
  l->from[r] = 0;
  l->visible[r] = place + 1;
  for (int64_t i = 0; i < h; i++)
    l->embedded[r * h + i] = read_element(e->embedding, token * h + i, e->embedding_dtype);
}

/* The pending pairs of all chains, whose features come from the target. */
static void first_level(Level *l, const Shape *shape, const Eagle *e, const Chains *c) {
  int64_t pair = 0;
  l->asked = 0;
  for (int64_t b = 0; b < c->count; b++) {
    c->sizes[b] = 0;
    l->unbroken[b] = 1;
    if (!c->limits[b]) continue;
    for (int32_t i = 0; i < c->fresh[b]; i++, pair++)
      add_row(l, shape, e, c->slots[b], c->lengths[b] + i, c->tokens[pair]);
    l->last[l->asked] = l->rows.count - 1;
    l->owners[l->asked++] = b;
  }
}

/* The tokens just drafted by the chains that go on, whose features are the layer's own output. */
static void next_level(Level *l, const Shape *shape, const Eagle *e, const Chains *c, const uint8_t *doubts) {
  const int64_t h = shape->hidden, before = l->asked;
  l->asked = l->rows.count = 0;
  for (int64_t i = 0; i < before; i++) {
    const int64_t b = l->owners[i], size = c->sizes[b], from = l->last[i];
    if (doubts[i] || size >= c->limits[b]) continue;
    /* rows only move forward, so nothing is overwritten that is still to be read */
    memmove(l->features + l->asked * h, l->features + from * h, (size_t)h * 4);
    add_row(l, shape, e, c->slots[b], c->lengths[b] + c->fresh[b] + (int32_t)size - 1,
            c->drafted[b * c->levels + size - 1]);
    l->last[l->asked] = l->asked;
    l->owners[l->asked++] = b;
  }
}

/* features [pairs, hidden] = fuse(norm of each tap * tap_norm). */
static void fuse_taps(const Member *m, const Shape *shape, const Eagle *e, const Chains *c, Own own, float *features) {
  const int64_t h = shape->hidden, width = e->taps * h;
  float *normed = own.normed;
  const Linear fuse = {e->fuse, NULL, width, h, shape->weight_dtype};
  for (int64_t i = 0; i < c->pairs * width; i++) normed[i] = read_element(c->hidden, i, c->hidden_dtype);
  for (int64_t i = 0; i < c->pairs; i++)
    for (int64_t t = 0; t < e->taps; t++)
      rms_norm(normed + i * width + t * h, e->tap_norm + t * h, normed + i * width + t * h, 1, h, h, shape->eps,
               FLOAT32);
  const Input in = osd_input(normed, c->pairs, width, fuse.dtype, own.narrow);
  const Step step = step_of(&fuse, NULL, NULL, c->pairs);
  for (int64_t item; (item = take(m, step.count)) >= 0;)
    osd_linear_chunk(&fuse, &in, features, c->pairs, item, REPLACE, FLOAT32, reads_on(m, &step, NULL, c->pairs, item));
  meet(m);
}

/* odds [asked] = what the head says of the tokens that the rows last[0..asked) of x [rows, hidden] have read. `widened`
 * [asked, hidden] is shared by all members. */
static void judge_rows(const Member *m, const Judge *judge, const float *x, const int64_t *last, int64_t asked, Own own,
                       float *widened, float *odds) {
  const int64_t h = judge->blocks[0].inputs;
  float *const states = own.normed;
  for (int64_t i = 0; i < asked; i++) {
    const float *row = x + last[i] * h;
    const float scale = 1.0f / sqrtf(product(row, row, h) / (float)h + FLT_EPSILON);
    for (int64_t j = 0; j < h; j++) states[i * h + j] = row[j] * scale;
  }
  for (int b = 0; b < JUDGE_BLOCKS; b++) {
    const Linear *block = judge->blocks + b;
    const Input in = osd_input(states, asked, h, block->dtype, own.narrow);
    const Step step = step_of(block, NULL, NULL, asked);
    for (int64_t item; (item = take(m, step.count)) >= 0;)
      osd_linear_chunk(block, &in, widened, asked, item, REPLACE, FLOAT32, reads_on(m, &step, NULL, asked, item));
    meet(m);
    int64_t i = 0;
    for (; i + WIDTH <= asked * h; i += WIDTH) put(states + i, load(states + i) + silu(load(widened + i)));
    for (; i < asked * h; i++) states[i] += widened[i] / (1.0f + expf(-widened[i]));
    meet(m); /* before the next block replaces what others still read */
  }
  for (int64_t i = m->me; i < asked; i += m->count) odds[i] = judge->bias + product(states + i * h, judge->odds, h);
}

/* Whether chains end by what the head says of what they have read. */
static void doubt(Level *l, const Judge *judge, uint8_t *doubts) {
  for (int64_t i = 0; i < l->asked; i++) {
    double *unbroken = l->unbroken + l->owners[i];
    *unbroken /= 1 + exp(-(double)l->odds[i]);
    doubts[i] |= 1 - *unbroken > judge->most;
  }
}

/* The first most probable of logits [count], and whether its probability is below `floor`. */
static int64_t most_probable(const float *logits, int64_t count, float floor, uint8_t *doubts) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++)
    if (logits[i] > logits[best]) best = i;
  *doubts = 0;
  if (floor > 0) {
    Vector sums = all(0);
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) sums += exp_nonpositive(load(logits + i) - logits[best]);
    float total = sum_of(sums);
    for (; i < count; i++) total += expf(logits[i] - logits[best]);
    *doubts = 1.0f < floor * total;
  }
  return best;
}

/* Draft every chain to its limit, or until it doubts. 1 when there is no memory. */
int osd_eagle_chains(const Layer *layer, const Shape *shape, const Eagle *e, const Chains *c) {
  const int64_t rows = c->pairs > c->count ? c->pairs : c->count;
  const int64_t h = shape->hidden, widest = (e->taps > 2 ? e->taps : 2) * h;
  const Linear head = {e->head, NULL, h, e->vocabulary, shape->weight_dtype};
  Level l;
  int failed = 0;
  if (!c->count) return 0;
  if (make_level(&l, shape, e, c)) return 1;
  uint8_t *doubts = malloc((size_t)c->count);
  if (!doubts) {
    free(l.all);
    return 1;
  }
  first_level(&l, shape, e, c);
  for (int64_t level = 0; l.asked && !failed; level++) {
    Space s;
    failed = make_space(&s, shape, &l.rows, rows, widest);
    if (failed) break;
    Team team = {0};
#pragma omp parallel num_threads(shape->threads)
    {
      const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
      const Own own = own_space(&m, &s);
      if (!level) fuse_taps(&m, shape, e, c, own, l.features);
      join(layer, shape, e, l.embedded, l.features, own.normed, l.rows.count);
      const Step then = step_of(&head, NULL, NULL, l.asked);
      run_layer(&m, layer, 0, shape, &l.rows, &s, l.features, own, 2 * h, &then);
      if (c->judge && level) judge_rows(&m, c->judge, l.features, l.last, l.asked, own, l.judged, l.odds);
      to_logits(&m, shape, e->final_norm, &head, l.features, l.last, l.asked, own, l.logits);
      for (int64_t i; (i = take(&m, l.asked)) >= 0;) {
        const int64_t b = l.owners[i], at = b * c->levels + level;
        const float *logits = l.logits + i * e->vocabulary;
        c->drafted[at] = e->draft_ids[most_probable(logits, e->vocabulary, c->floor, doubts + i)];
        c->sizes[b] = (int32_t)level + 1;
        memcpy(c->logits + at * e->vocabulary, logits, (size_t)e->vocabulary * 4);
      }
    }
    free_space(&s);
    if (c->judge && level) doubt(&l, c->judge, doubts);
    next_level(&l, shape, e, c, doubts);
  }
  free(doubts);
  free(l.all);
  return failed;
}
