/* EAGLE drafter: a step for the nodes of any trees, or whole greedy chains or trees in a single call.
 *
 * The attention of its layer reads [norm(embedded), norm(features)]; the layer's input_norm is the norm of the features.
 */
#include <float.h>

#include "best_first.h"
#include "layer.h"

#define JUDGE_BLOCKS 3

/* Parts of a drafter outside its layer. */
typedef struct {
  const float *embedding_norm, *final_norm, *tap_norm; /* [hidden], [hidden], [taps * hidden] */
  const void *fuse, *head;                             /* packed */
  const void *embedding;                               /* [target vocabulary, hidden] of embedding_dtype */
  const float *cosines, *sines;                        /* [places, dim] of the rotary embedding */
  const int64_t *draft_ids;                            /* [vocabulary] */
  int64_t vocabulary, taps;
  int32_t embedding_dtype;
} Eagle;

/* An acceptance head, see osd.drafting.acceptance_head: blocks x + silu(W x + b), then odds [hidden] . x + bias. A chain
 * ends when the probability that any of its tokens is rejected exceeds `most`. */
typedef struct {
  Linear blocks[JUDGE_BLOCKS];
  const float *odds;
  float bias, most;
} Judge;

/* `count` sequences to draft for. Sequence b continues from its fresh[b] pending pairs (its next tokens and the hidden
 * states before them), which are stored from place lengths[b] on. */
typedef struct {
  const int32_t *slots, *lengths, *fresh, *limits; /* [count]; without a limit, no pairs and no draft */
  const int64_t *tokens;                           /* [pairs] */
  const void *hidden;                              /* [pairs, taps * hidden] of hidden_dtype */
  int64_t count, pairs, hidden_dtype;
} Drafts;

/* Greedy chains of drafts, and buffers for their results. */
typedef struct {
  Drafts drafts;
  int64_t *drafted; /* [count, levels] target ids */
  int32_t *sizes;   /* [count] */
  float *logits;    /* [count, levels, vocabulary] */
  int64_t levels;
  const Judge *judge; /* or null */
  float floor;        /* a chain ends after a token of lower probability */
} Chains;

/* Trees of up to `most` nodes each, and buffers for their results: node i of a sequence is stored i places after its
 * committed tokens. */
typedef struct {
  Drafts drafts;
  Paying paying;
  int64_t *drafted, *parents; /* [count, most] target ids, and nodes, -1 for the root */
  int64_t *sizes;             /* [count] */
  double *estimates;          /* [count, most] the drafter's probability of each node */
  float *logits;              /* [count, 1 + most, vocabulary] behind the expanded nodes: the root, then the nodes */
  int64_t *wanted;             /* [levels] number of expanded nodes, 0 after the last level */
  double *seconds;            /* [levels] duration of each level */
  int64_t most;
} Trees;

/* x [rows, 2 * hidden] = [norm(embedded), norm(features)]. */
static void join(const Layer *layer, const Shape *shape, const Eagle *e, const float *embedded, const float *features,
                 float *x, int64_t rows) {
  const int64_t h = shape->hidden;
  rms_norm(embedded, e->embedding_norm, x, rows, h, 2 * h, shape->eps, FLOAT32);
  rms_norm(features, layer->input_norm, x + h, rows, h, 2 * h, shape->eps, FLOAT32);
}

/* Run a step: replace features [rows, hidden] by the next ones, and compute logits [wanted, vocabulary] after the rows
 * last[0..wanted). Returns 1 if an allocation failed. */
int osd_eagle(const Layer *layer, const Shape *shape, const Eagle *e, const Rows *r, const float *embedded,
              float *features, const int64_t *last, int64_t wanted, float *logits) {
  const int64_t h = shape->hidden, rows = r->count;
  Space s;
  if (!rows) return 0;
  if (make_space(&s, shape, r, rows > wanted ? rows : wanted, 2 * h)) return 1;
  const Linear head = {e->head, NULL, h, e->vocabulary, shape->weight_dtype};
  Team team = {0};
#pragma omp parallel num_threads(shape->threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    const LocalSpace local = local_space(&m, &s);
    join(layer, shape, e, embedded, features, local.normed, rows);
    run_layer(&m, layer, 0, shape, r, &s, features, local, 2 * h, NULL);
    to_logits(&m, shape, e->final_norm, &head, features, last, wanted, local, logits);
  }
  free_space(&s);
  return 0;
}

/* Rows of a level of the chains or trees, and their buffers. */
typedef struct {
  char *all;
  float *embedded, *features, *logits, *judged, *odds; /* the last two: of the chains that continue */
  double *unbroken;                                     /* [count] probability that all tokens read so far are accepted */
  int32_t *slots, *stores, *from, *visible;
  int64_t *positions, *last, *owners; /* of the chains that continue: last row and index */
  int64_t wanted;
  Rows rows;
} Level;

/* Allocate a level of `rows` rows with logits of `most`, judged by a head if `judges`. Returns 1 on failure. */
static int make_level(Level *l, const Shape *shape, const Eagle *e, int64_t rows, int64_t most, int judges) {
  const int64_t h = shape->hidden, judged = judges ? most * (h + 1) : 0;
  const int64_t floats = rows * 2 * h + most * e->vocabulary + judged;
  if (posix_memalign((void **)&l->all, 64, (size_t)(24 * most + 4 * floats + 24 * rows))) return 1;
  l->last = (int64_t *)l->all;
  l->owners = l->last + most;
  l->positions = l->owners + most;
  l->unbroken = (double *)(l->positions + rows);
  l->embedded = (float *)(l->unbroken + most);
  l->features = l->embedded + rows * h;
  l->logits = l->features + rows * h;
  l->judged = l->logits + most * e->vocabulary;
  l->odds = l->judged + (judged ? most * h : 0);
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

/* Add the pending pairs of all drafts, whose features come from the target. */
static void first_level(Level *l, const Shape *shape, const Eagle *e, const Drafts *d) {
  int64_t pair = 0;
  l->wanted = 0;
  for (int64_t b = 0; b < d->count; b++) {
    if (!d->limits[b]) continue;
    for (int32_t i = 0; i < d->fresh[b]; i++, pair++)
      add_row(l, shape, e, d->slots[b], d->lengths[b] + i, d->tokens[pair]);
    l->last[l->wanted] = l->rows.count - 1;
    l->owners[l->wanted++] = b;
  }
}

/* Add the tokens just drafted by the chains that continue, whose features are the layer's output. */
static void next_level(Level *l, const Shape *shape, const Eagle *e, const Chains *c, const uint8_t *doubts) {
  const int64_t h = shape->hidden, before = l->wanted;
  const Drafts *d = &c->drafts;
  l->wanted = l->rows.count = 0;
  for (int64_t i = 0; i < before; i++) {
    const int64_t b = l->owners[i], size = c->sizes[b], from = l->last[i];
    if (doubts[i] || size >= d->limits[b]) continue;
    /* rows only move forward, so no unread row is overwritten */
    memmove(l->features + l->wanted * h, l->features + from * h, (size_t)h * 4);
    add_row(l, shape, e, d->slots[b], d->lengths[b] + d->fresh[b] + (int32_t)size - 1,
            c->drafted[b * c->levels + size - 1]);
    l->last[l->wanted] = l->wanted;
    l->owners[l->wanted++] = b;
  }
}

/* features [pairs, hidden] = fuse(norm of each tap * tap_norm). */
static void fuse_taps(const Member *m, const Shape *shape, const Eagle *e, const Drafts *d, LocalSpace local,
                      float *features) {
  const int64_t h = shape->hidden, width = e->taps * h;
  float *normed = local.normed;
  const Linear fuse = {e->fuse, NULL, width, h, shape->weight_dtype};
  for (int64_t i = 0; i < d->pairs * width; i++) normed[i] = read_element(d->hidden, i, (int)d->hidden_dtype);
  for (int64_t i = 0; i < d->pairs; i++)
    for (int64_t t = 0; t < e->taps; t++)
      rms_norm(normed + i * width + t * h, e->tap_norm + t * h, normed + i * width + t * h, 1, h, h, shape->eps,
               FLOAT32);
  const Input in = osd_input(normed, d->pairs, width, fuse.dtype, local.narrow);
  const Step step = step_of(&fuse, NULL, NULL, d->pairs);
  for (int64_t item; (item = take(m, step.count)) >= 0;)
    osd_linear_chunk(&fuse, &in, features, d->pairs, item, REPLACE, FLOAT32, reads_on(m, &step, NULL, d->pairs, item));
  meet(m);
}

/* Compute odds [wanted], the head's log-odds that the tokens read by the rows last[0..wanted) of x [rows, hidden] are
 * accepted. `widened` [wanted, hidden] is shared by all members. */
static void judge_rows(const Member *m, const Judge *judge, const float *x, const int64_t *last, int64_t wanted,
                       LocalSpace local, float *widened, float *odds) {
  const int64_t h = judge->blocks[0].inputs;
  float *const states = local.normed;
  for (int64_t i = 0; i < wanted; i++) {
    const float *row = x + last[i] * h;
    const float scale = 1.0f / sqrtf(product(row, row, h) / (float)h + FLT_EPSILON);
    for (int64_t j = 0; j < h; j++) states[i * h + j] = row[j] * scale;
  }
  for (int b = 0; b < JUDGE_BLOCKS; b++) {
    const Linear *block = judge->blocks + b;
    const Input in = osd_input(states, wanted, h, block->dtype, local.narrow);
    const Step step = step_of(block, NULL, NULL, wanted);
    for (int64_t item; (item = take(m, step.count)) >= 0;)
      osd_linear_chunk(block, &in, widened, wanted, item, REPLACE, FLOAT32, reads_on(m, &step, NULL, wanted, item));
    meet(m);
    int64_t i = 0;
    for (; i + WIDTH <= wanted * h; i += WIDTH) put(states + i, load(states + i) + silu(load(widened + i)));
    for (; i < wanted * h; i++) states[i] += widened[i] / (1.0f + expf(-widened[i]));
    meet(m); /* before the next block overwrites values that other members read */
  }
  for (int64_t i = m->me; i < wanted; i += m->count) odds[i] = judge->bias + product(states + i * h, judge->odds, h);
}

/* Mark the chains that end by the head's odds for the tokens read so far. */
static void doubt(Level *l, const Judge *judge, uint8_t *doubts) {
  for (int64_t i = 0; i < l->wanted; i++) {
    double *unbroken = l->unbroken + l->owners[i];
    *unbroken /= 1 + exp(-(double)l->odds[i]);
    doubts[i] |= 1 - *unbroken > judge->most;
  }
}

/* Return the first most probable of logits [count]; `doubts` is set if its probability is below `floor`. */
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

/* Compute the wanted logits of a level. For the `first` level, compute its features from the drafts' hidden states. */
static void level_logits(const Member *m, const Layer *layer, const Shape *shape, const Eagle *e, Level *l, Space *s,
                         LocalSpace local, const Drafts *first) {
  const int64_t h = shape->hidden;
  const Linear head = {e->head, NULL, h, e->vocabulary, shape->weight_dtype};
  const Step then = step_of(&head, NULL, NULL, l->wanted);
  if (first) fuse_taps(m, shape, e, first, local, l->features);
  join(layer, shape, e, l->embedded, l->features, local.normed, l->rows.count);
  run_layer(m, layer, 0, shape, &l->rows, s, l->features, local, 2 * h, &then);
  to_logits(m, shape, e->final_norm, &head, l->features, l->last, l->wanted, local, l->logits);
}

/* Draft every chain up to its limit or its first doubt. Returns 1 if an allocation failed. */
int osd_eagle_chains(const Layer *layer, const Shape *shape, const Eagle *e, const Chains *c) {
  const Drafts *d = &c->drafts;
  const int64_t rows = d->pairs > d->count ? d->pairs : d->count;
  const int64_t h = shape->hidden, widest = (e->taps > 2 ? e->taps : 2) * h;
  Level l;
  int failed = 0;
  if (!d->count) return 0;
  if (make_level(&l, shape, e, rows, d->count, c->judge != NULL)) return 1;
  uint8_t *doubts = malloc((size_t)d->count);
  if (!doubts) {
    free(l.all);
    return 1;
  }
  for (int64_t b = 0; b < d->count; b++) {
    c->sizes[b] = 0;
    l.unbroken[b] = 1;
  }
  first_level(&l, shape, e, d);
  for (int64_t level = 0; l.wanted && !failed; level++) {
    Space s;
    failed = make_space(&s, shape, &l.rows, rows, widest);
    if (failed) break;
    Team team = {0};
#pragma omp parallel num_threads(shape->threads)
    {
      const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
      const LocalSpace local = local_space(&m, &s);
      level_logits(&m, layer, shape, e, &l, &s, local, level ? NULL : d);
      if (c->judge && level) judge_rows(&m, c->judge, l.features, l.last, l.wanted, local, l.judged, l.odds);
      for (int64_t i; (i = take(&m, l.wanted)) >= 0;) {
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

/* Prepare the expansion of the nodes in `level`; their features are the outputs of their parents in `states` [count,
 * 1 + most, hidden]. `base` and `mask` [rows, most] are buffers. */
static void node_level(Level *l, const Shape *shape, const Eagle *e, const Trees *t, const Candidate *level, int64_t count,
                       const float *states, int32_t *base, uint8_t *mask) {
  const Drafts *d = &t->drafts;
  const int64_t h = shape->hidden, most = t->most;
  l->wanted = l->rows.count = l->rows.mask_width = 0;
  l->rows.base = NULL;
  l->rows.mask = NULL;
  memset(base, 0, (size_t)count * sizeof *base);
  memset(mask, 0, (size_t)(count * most));
  for (int64_t i = 0; i < count; i++) {
    const int64_t b = level[i].row, node = level[i].node, *parents = t->parents + b * most;
    const int32_t begin = d->lengths[b] + d->fresh[b];
    int64_t seen = 0;
    memcpy(l->features + i * h, states + (b * (1 + most) + 1 + level[i].parent) * h, (size_t)h * 4);
    add_row(l, shape, e, d->slots[b], begin + (int32_t)node, t->drafted[b * most + node]);
    l->positions[i] = begin + level[i].depth;
    for (int64_t above = node; above >= 0; above = parents[above], seen++) mask[i * most + above] = 1;
    if (seen == node + 1) { /* it sees all earlier nodes */
      memset(mask + i * most, 0, (size_t)most);
    } else {
      base[i] = l->visible[i] = begin;
      l->rows.base = base;
      l->rows.mask = mask;
      l->rows.mask_width = most;
    }
    l->last[l->wanted] = i;
    l->owners[l->wanted++] = b;
  }
}

/* Store the candidates that have become nodes. */
static void keep_nodes(const Trees *t, const Eagle *e, const Pool *pool) {
  for (const Candidate *node = pool->all; node < pool->all + pool->count; node++) {
    const int64_t at = node->row * t->most + node->node;
    if (node->node < 0) continue;
    t->drafted[at] = e->draft_ids[node->column];
    t->parents[at] = node->parent;
    t->estimates[at] = node->estimate;
  }
}

/* Grow every tree while a further level pays, see best_first.h; all roots of drafts with a limit are expanded. Returns 1
 * if an allocation failed. */
int osd_eagle_trees(const Layer *layer, const Shape *shape, const Eagle *e, const Trees *t) {
  const Drafts *d = &t->drafts;
  const Paying *p = &t->paying;
  const int64_t h = shape->hidden, widest = (e->taps > 2 ? e->taps : 2) * h, children = p->children;
  int64_t nodes = d->count, rows = d->pairs;
  for (int64_t b = 0; b < d->count; b++) nodes += d->limits[b];
  if (rows < nodes) rows = nodes;
  const int64_t candidates = nodes * children;
  Level l;
  char *space;
  if (!d->count) return 0;
  if (make_level(&l, shape, e, rows, nodes, 0)) return 1;
  const size_t sizes[] = {(size_t)candidates * sizeof(Candidate), (size_t)nodes * sizeof(Candidate), (size_t)candidates * 8,
                          (size_t)(d->count * (1 + t->most) * h) * 4, (size_t)candidates * 4, (size_t)nodes * 4};
  size_t bytes = (size_t)(nodes * t->most);
  for (int i = 0; i < 6; i++) bytes += sizes[i];
  if (posix_memalign((void **)&space, 64, bytes)) {
    free(l.all);
    return 1;
  }
  Pool pool = {(Candidate *)space, 0, 0};
  Candidate *const level = (Candidate *)(space += sizes[0]);
  int64_t *const ids = (int64_t *)(space += sizes[1]);
  float *const states = (float *)(space += sizes[2]), *const logp = (float *)(space += sizes[3]);
  int32_t *const base = (int32_t *)(space += sizes[4]);
  uint8_t *const mask = (uint8_t *)(space += sizes[5]);
  int failed = 0;

  first_level(&l, shape, e, d);
  for (int64_t i = 0; i < l.wanted; i++) level[i] = (Candidate){1, 1, 0, (int32_t)l.owners[i], -1, -1, -1};
  for (int64_t b = 0; b < d->count; b++) t->sizes[b] = 0;
  for (int64_t i = 0; i < d->count * t->most; i++) t->drafted[i] = t->parents[i] = -1, t->estimates[i] = 0;
  for (int64_t depth = 0; depth < p->levels; depth++) t->wanted[depth] = 0;
  for (int64_t depth = 0; depth < p->levels && l.wanted; depth++) {
    const double begun = omp_get_wtime();
    Space s;
    failed = make_space(&s, shape, &l.rows, rows, widest);
    if (failed) break;
    Team team = {0};
#pragma omp parallel num_threads(shape->threads)
    {
      const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
      const LocalSpace local = local_space(&m, &s);
      level_logits(&m, layer, shape, e, &l, &s, local, depth ? NULL : d);
      for (int64_t i; (i = take(&m, l.wanted)) >= 0;) {
        const int64_t at = level[i].row * (1 + t->most) + 1 + level[i].node;
        const float *logits = l.logits + i * e->vocabulary;
        osd_few(logits, e->vocabulary, (int)children, ids + i * children, logp + i * children);
        memcpy(t->logits + at * e->vocabulary, logits, (size_t)e->vocabulary * 4);
        memcpy(states + at * h, l.features + l.last[i] * h, (size_t)h * 4);
      }
    }
    free_space(&s);
    for (int64_t i = 0; i < l.wanted * children; i++) {
      const Candidate above = level[i / children];
      const double estimate = exp((double)logp[i]);
      const double chance = above.chance * chance_of(p, depth, i % children, estimate);
      add_candidate(&pool, (Candidate){chance, estimate, ids[i], above.row, above.node, (int32_t)depth, -1});
    }
    t->wanted[depth] = l.wanted;
    int64_t count = take_nodes(p, &pool, d->limits, t->sizes, depth, level);
    keep_nodes(t, e, &pool);
    count = depth + 1 < p->levels ? worth_expanding(p, &pool, level, count, depth + 1) : 0;
    node_level(&l, shape, e, t, level, count, states, base, mask);
    t->seconds[depth] = omp_get_wtime() - begun;
  }
  free(pool.all);
  free(l.all);
  return failed;
}
