/* Recall, an n-gram cache of the target's distributions. Loaded by osd/recall/native.py. */
#include <pthread.h>

#include "common.h"
#include "noise.h"

enum {
  ORDERS = 4,                /* context lengths: 1 to 4 tokens */
  WAYS = 8,                  /* entries of a set: the tags of a set fill a cache line */
  TAIL = 16,                 /* tokens of a context that are compared */
  COPIED = ORDERS + 1,       /* least tokens that a copy repeats */
  STEPS = 16,                /* earlier occurrences that are tried for the longest copy */
  LEVELS = 2 * ORDERS + 2,   /* of a mixture: a shared and a request's entry of each order, a copy, another drafter */
  COPY = 2 * ORDERS,         /* the level of a copy */
  OTHER = 2 * ORDERS + 1,    /* the level of another drafter */
  FORCED = OTHER + 1,        /* the level of the only token that a constraint allows */
  MOST = (2 * ORDERS + 1) * KEPT + 1, /* limit of tokens of a mixture */
  AGES = 4,                  /* buckets of counts */
  RANKS = 3,                 /* buckets of ranks: the most probable token, the second, the rest */
  SHARES = 12,               /* buckets of probabilities */
  DEPTHS = 3,                /* buckets of a node's depth: the first token, the second, the rest */
  MODES = 3,                 /* greedy, sampled with a chosen token, sampled with a drawn token */
  SAMPLED = 1,
  DRAWN = 2,
  MEMORY = 32,               /* limit of an entry's count */
  TEXT_ENTRIES = 1 << 14,    /* limit of entries in the table of one text */
  TARGET_TOKENS = 64,        /* tokens of a target's distribution that are used */
  CHILDREN = 4,              /* limit of children of a node, if all are chosen */
  WIDEST = 3,                /* limit of children of a node whose last child is drawn */
};

static const float EDGES[SHARES - 1] = {.01f, .03f, .08f, .15f, .25f, .35f, .5f, .65f, .8f, .9f, .97f};
static const float MIDDLES[SHARES] = {.005f, .02f, .055f, .115f, .2f, .3f, .425f, .575f, .725f, .85f, .935f, .985f};

typedef struct {
  uint32_t tag, stamp; /* tag 0: free; stamp in seconds */
} Place;

typedef struct {
  uint32_t ids[KEPT];
  uint16_t p[KEPT]; /* in 1/65535, in descending order */
  uint16_t count, unused;
  uint32_t readers; /* marks of the requests that it was learnt from, up to two bits each */
} Entry;

typedef struct {
  int64_t sets;
  Place *places; /* [sets, WAYS] */
  Entry *entries;
} Table;

typedef struct {
  float tested, accepted;
} Cell;

/* Fitted parameters of a table: the weights of its levels, and the counted accuracy of its tokens. */
typedef struct {
  float kappas[COPY];       /* logarithms, by level */
  float copies[TAIL + 1];   /* log-odds of a copy, by its length */
  float other_odds[LEVELS]; /* log-odds of another drafter, by recall's own last level + 1 */
  Cell coarse[MODES][RANKS][SHARES];
  Cell fine[MODES][LEVELS][AGES][DEPTHS][RANKS][SHARES];
} Weights;

typedef struct {
  Table table;
  Weights *weights;
  pthread_mutex_t lock;
} Recall;

/* The text of one request, with its small table and a linked list of the positions where each COPIED tokens ended. */
typedef struct {
  Table table;
  int64_t length, room, heads;
  int32_t *tokens;   /* [room] */
  int32_t *latest;   /* [heads] the latest position after such tokens, by their hash */
  int32_t *earlier;  /* [room] the previous position of the list */
} Text;

/* The mixture of all levels after one context. */
typedef struct {
  int count, level, age;
  int below;     /* the level before the other drafter is mixed in */
  float weight;  /* of the other drafter */
  int32_t ids[MOST];
  float q[MOST];
} Mixture;

/* A distribution: of the target, or of another drafter. */
typedef struct {
  const int64_t *ids;
  const float *p;
  int count;
} Distribution;

static uint64_t mixed(uint64_t hash, int32_t token) {
  hash = (hash ^ (uint32_t)token) * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 29;
  hash *= 0xbf58476d1ce4e5b9u;
  return hash ^ (hash >> 32);
}

static int table_new(Table *table, int64_t entries) {
  table->sets = entries > WAYS ? entries / WAYS : 1;
  table->places = aligned_alloc(64, (size_t)table->sets * WAYS * sizeof(Place));
  table->entries = calloc((size_t)table->sets * WAYS, sizeof(Entry));
  if (!table->places || !table->entries) return 1;
  memset(table->places, 0, (size_t)table->sets * WAYS * sizeof(Place));
  return 0;
}

static void table_free(Table *table) {
  free(table->places);
  free(table->entries);
}

static int64_t set_of(const Table *table, uint64_t hash) {
  return (int64_t)(((hash >> 32) * (uint64_t)table->sets) >> 32) * WAYS;
}

static uint32_t tag_of(uint64_t hash) { return (uint32_t)hash | 1u; }

static Entry *find(const Table *table, uint64_t hash) {
  const int64_t set = set_of(table, hash);
  for (int way = 0; way < WAYS; way++)
    if (table->places[set + way].tag == tag_of(hash)) return table->entries + set + way;
  return NULL;
}

/* Return the entry of a key; a new entry replaces the least recently learnt of its set. */
static Entry *claim(Table *table, uint64_t hash, uint32_t now) {
  const int64_t set = set_of(table, hash);
  int64_t at = set;
  for (int way = 0; way < WAYS; way++) {
    Place *place = table->places + set + way;
    if (place->tag == tag_of(hash)) {
      place->stamp = now;
      return table->entries + set + way;
    }
    const Place *oldest = table->places + at;
    if (oldest->tag && (!place->tag || place->stamp < oldest->stamp)) at = set + way;
  }
  table->places[at] = (Place){tag_of(hash), now};
  memset(table->entries + at, 0, sizeof(Entry));
  return table->entries + at;
}

/* Update the running mean, p <- (count p + target) / (count + 1), and keep its most probable tokens. */
static void learn_entry(Entry *entry, const Distribution *target, uint32_t reader) {
  uint32_t ids[2 * KEPT];
  float p[2 * KEPT];
  int kinds = 0;
  const float old = entry->count, all = 1.0f / (old + 1.0f);
  for (int i = 0; i < KEPT && entry->p[i]; i++) {
    ids[kinds] = entry->ids[i];
    p[kinds++] = entry->p[i] * old * all;
  }
  for (int i = 0; i < target->count && i < KEPT; i++) {
    int at = 0;
    while (at < kinds && ids[at] != (uint32_t)target->ids[i]) at++;
    if (at == kinds) {
      ids[kinds] = (uint32_t)target->ids[i];
      p[kinds++] = 0;
    }
    p[at] += target->p[i] * 65535.0f * all;
  }
  for (int i = 0; i < KEPT; i++) {
    int best = i;
    for (int j = i + 1; j < kinds; j++) best = p[j] > p[best] ? j : best;
    const int kept = i < kinds && p[best] >= .5f;
    entry->ids[i] = kept ? ids[best] : 0;
    entry->p[i] = kept ? (uint16_t)(p[best] + .5f) : 0;
    if (i < kinds) {
      ids[best] = ids[i];
      p[best] = p[i];
    }
  }
  if (entry->count < MEMORY) entry->count++;
  entry->readers |= reader;
}

/* Hash the last n tokens of a context for each order n; `tail` starts with the last token. Returns their number. */
static int hashes_of(const int32_t *tail, uint64_t *hashes) {
  uint64_t hash = 0;
  int order = 0;
  for (; order < ORDERS && tail[order] >= 0; order++) hashes[order] = hash = mixed(hash, tail[order]);
  return order;
}

static void learn_table(Table *table, const uint64_t *hashes, int orders, const Distribution *target, uint32_t reader,
                        uint32_t now) {
  for (int order = 0; order < orders; order++)
    learn_entry(claim(table, hashes[order] + (uint64_t)order, now), target, reader);
}

static int age_of(int count) { return count >= 8 ? 3 : count >= 3 ? 2 : count - 1; }

static int share_of(float q) {
  int share = 0;
  while (share < SHARES - 1 && q >= EDGES[share]) share++;
  return share;
}

static float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

/* The probabilities of the target's tokens in a mixture, before the next level is mixed in. */
typedef struct {
  float q[KEPT];
} Known;

/* Mix in a level with the weight `lambda`. Returns the derivative by lambda of the target's expected log-likelihood,
 * sum p log q, limited to [-8, 8]; 0 without a target. */
static float mix_in(Mixture *m, const int32_t *ids, const float *p, int count, float lambda, const Distribution *target,
                    Known *known) {
  float slope = 0;
  if (target)
    for (int j = 0; j < target->count && j < KEPT; j++) {
      float added = 0;
      for (int i = 0; i < count; i++) added = ids[i] == (int32_t)target->ids[j] ? p[i] : added;
      const float before = known->q[j], now = known->q[j] = lambda * added + (1 - lambda) * before;
      slope += target->p[j] * (added - before) / (now + 1e-3f);
    }
  for (int i = 0; i < m->count; i++) m->q[i] *= 1 - lambda;
  for (int i = 0; i < count; i++) {
    int at = 0;
    while (at < m->count && m->ids[at] != ids[i]) at++;
    if (at == m->count) {
      m->ids[m->count] = ids[i];
      m->q[m->count++] = 0;
    }
    m->q[at] += lambda * p[i];
  }
  return slope < -8 ? -8 : slope > 8 ? 8 : slope;
}

static float clamped(float value, float most) { return value < -most ? -most : value > most ? most : value; }

static const float STEP = .02f; /* of the online fit of the levels' weights */

static void mix_entry(Mixture *m, const Entry *entry, float *kappa, int level, const Distribution *target,
                      Known *known) {
  int32_t ids[KEPT];
  float p[KEPT];
  int count = 0;
  for (; count < KEPT && entry->p[count]; count++) {
    ids[count] = (int32_t)entry->ids[count];
    p[count] = entry->p[count] / 65535.0f;
  }
  const float lambda = entry->count / (entry->count + expf(*kappa));
  const float slope = mix_in(m, ids, p, count, lambda, target, known);
  if (target) *kappa = clamped(*kappa - STEP * slope * lambda * (1 - lambda), 4);
  m->level = level;
  m->age = age_of(entry->count);
}

/* Return the length of the longest earlier match of the last tokens, 0 for none; `token` becomes the token after it. */
static int longest_copy(const Text *text, const int32_t *tail, int32_t *token) {
  uint64_t hash = 0;
  for (int i = 0; i < COPIED; i++) {
    if (tail[i] < 0) return 0;
    hash = mixed(hash, tail[i]);
  }
  int longest = 0, steps = 0;
  for (int32_t after = text->latest[hash & (uint64_t)(text->heads - 1)]; after > 0 && steps < STEPS; steps++) {
    if (after < text->length) {
      int same = 0;
      while (same < TAIL && same < after && tail[same] >= 0 && tail[same] == text->tokens[after - 1 - same]) same++;
      if (same >= COPIED && same > longest) {
        longest = same;
        *token = text->tokens[after];
      }
    }
    after = text->earlier[after];
  }
  return longest;
}

/* Mix all levels that know a context. With a target, fit the weights of the levels to it. */
static void mix(Recall *recall, const Text *text, const int32_t *tail, const Distribution *target,
                const Distribution *other, Mixture *m) {
  uint64_t hashes[ORDERS];
  Weights *w = recall->weights;
  Known known = {{0}};
  const int orders = hashes_of(tail, hashes);
  m->count = 0;
  m->level = -1;
  m->age = 0;
  m->weight = 0;
  for (int order = 0; order < orders; order++) {
    const uint64_t key = hashes[order] + (uint64_t)order;
    const Entry *shared = find(&recall->table, key), *private = find(&text->table, key);
    if (shared) mix_entry(m, shared, &w->kappas[2 * order], 2 * order, target, &known);
    if (private) mix_entry(m, private, &w->kappas[2 * order + 1], 2 * order + 1, target, &known);
  }
  int32_t token;
  const int length = longest_copy(text, tail, &token);
  if (length) {
    const float certain = 1, lambda = logistic(w->copies[length]);
    const float slope = mix_in(m, &token, &certain, 1, lambda, target, &known);
    if (target) w->copies[length] = clamped(w->copies[length] + STEP * slope * lambda * (1 - lambda), 4);
    m->level = COPY;
    m->age = length >= TAIL ? 3 : length >= 10 ? 2 : length >= 7 ? 1 : 0;
  }
  if (other) {
    int32_t ids[KEPT];
    for (int i = 0; i < other->count; i++) ids[i] = (int32_t)other->ids[i];
    float *odds = &w->other_odds[m->level + 1 < LEVELS ? m->level + 1 : LEVELS - 1];
    const float lambda = logistic(*odds);
    const float slope = mix_in(m, ids, other->p, other->count, lambda, target, &known);
    if (target) *odds = clamped(*odds + STEP * slope * lambda * (1 - lambda), 4);
    m->age = m->level < 0 ? 0 : m->level >= COPY ? 3 : 1 + m->level / ORDERS;
    m->below = m->level;
    m->weight = lambda;
    m->level = OTHER;
  }
}

/* Move the `most` most probable tokens of a mixture to the front, in descending order; returns their number. */
static int sort_first(Mixture *m, int most) {
  if (most > m->count) most = m->count;
  for (int i = 0; i < most; i++) {
    int best = i;
    for (int j = i + 1; j < m->count; j++) best = m->q[j] > m->q[best] ? j : best;
    const int32_t id = m->ids[i];
    const float q = m->q[i];
    m->ids[i] = m->ids[best];
    m->q[i] = m->q[best];
    m->ids[best] = id;
    m->q[best] = q;
  }
  return most;
}

/* Return the level that gave most of a token's probability: the other drafter, or the level below it. */
static int origin_of(const Mixture *m, int rank, const Distribution *other) {
  if (m->level != OTHER || m->below < 0) return m->level;
  float theirs = 0;
  for (int i = 0; i < other->count; i++) theirs = other->ids[i] == m->ids[rank] ? other->p[i] : theirs;
  return 2 * m->weight * theirs >= m->q[rank] ? OTHER : m->below;
}

/* Return the accuracy counters of a token by its rank and probability in a mixture; `depth` counts from 0. */
static Cell *cell_of(Weights *w, const Mixture *m, float q, int rank, int depth, int mode, Cell **coarse) {
  const int share = share_of(q), place = rank < RANKS ? rank : RANKS - 1;
  *coarse = &w->coarse[mode][place][share];
  return &w->fine[mode][m->level][m->age][depth < DEPTHS ? depth : DEPTHS - 1][place][share];
}

/* Return the probability that the target accepts such a token. */
static float chance_of(Weights *w, const Mixture *m, float q, int rank, int depth, int mode) {
  Cell *coarse;
  const Cell *fine = cell_of(w, m, q, rank, depth, mode, &coarse);
  const float usual = (coarse->accepted + 4 * MIDDLES[share_of(q)]) / (coarse->tested + 4);
  return (fine->accepted + 8 * usual) / (fine->tested + 8);
}

static void observe(Cell *cell, float accepted, float kept) {
  cell->tested = cell->tested * kept + 1;
  cell->accepted = cell->accepted * kept + accepted;
}

/* Return p to the power of `scale`, relative to the largest, against underflow. */
static float tempered(float p, float largest, float scale) { return powf(p / largest, scale); }

/* Write to q the distribution of the tokens after the first `fixed` ones, to the power of `scale`; the mixture is sorted.
 * Returns how many of them have a probability above 0. */
static int drawable(const Mixture *m, int kept, int fixed, float scale, float *q) {
  float total = 0;
  int count = 0;
  for (int i = fixed; i < kept && m->q[fixed] > 0; i++) {
    const float share = tempered(m->q[i], m->q[fixed], scale);
    if (share < 1e-9f) break;
    total += q[count++] = share;
  }
  for (int i = 0; i < count; i++) q[i] /= total;
  return count;
}

/* Count the accuracy of a mixture's tokens; `scale` is 1 / temperature, 0 for greedy. */
static void calibrate(Weights *w, Mixture *m, int32_t next, int depth, float scale, const Distribution *whole) {
  if (m->level < 0) return;
  const int mode = scale > 0 ? SAMPLED : 0, kept = sort_first(m, KEPT);
  for (int rank = 0; rank < kept && rank < CHILDREN; rank++) {
    Cell *coarse, *fine = cell_of(w, m, m->q[rank], rank, depth, mode, &coarse);
    observe(coarse, (float)(m->ids[rank] == next), .9995f);
    observe(fine, (float)(m->ids[rank] == next), .999f);
  }
  if (mode != SAMPLED || !(whole->p[0] > 0)) return;
  float p[KEPT], total = 0; /* the target's probabilities at this temperature, over its known tokens */
  for (int i = 0; i < kept; i++) p[i] = 0;
  for (int j = 0; j < whole->count; j++) {
    const float mass = scale == 1 ? whole->p[j] : tempered(whole->p[j], whole->p[0], scale);
    total += mass;
    for (int i = 0; i < kept; i++)
      if (m->ids[i] == (int32_t)whole->ids[j]) p[i] = mass;
  }
  if (scale == 1) total = 1;
  for (int fixed = 0; fixed < WIDEST && fixed < kept; fixed++) {
    float q[KEPT], common = 0;
    const int count = drawable(m, kept, fixed, scale, q);
    if (!count) break;
    for (int i = 0; i < count; i++) common += fminf(p[fixed + i] / total, q[i]);
    Cell *coarse, *fine = cell_of(w, m, q[0], fixed, depth, DRAWN, &coarse);
    observe(coarse, common, .9995f);
    observe(fine, common, .999f);
  }
}

int64_t osd_recall_entry_bytes(void) { return sizeof(Place) + sizeof(Entry); }

int64_t osd_recall_weight_bytes(void) { return sizeof(Weights); }

/* Return a table of `entries` entries, null if the allocation failed. */
Recall *osd_recall_new(int64_t entries) {
  Recall *recall = calloc(1, sizeof(Recall));
  if (!recall) return NULL;
  recall->weights = calloc(1, sizeof(Weights));
  if (table_new(&recall->table, entries) || !recall->weights) {
    table_free(&recall->table);
    free(recall->weights);
    free(recall);
    return NULL;
  }
  pthread_mutex_init(&recall->lock, NULL);
  for (int level = 0; level < COPY; level++) recall->weights->kappas[level] = logf(level % 2 ? 2 : .7f);
  for (int length = 0; length <= TAIL; length++) recall->weights->copies[length] = .25f * (float)(length - 8);
  return recall;
}

void osd_recall_free(Recall *recall) {
  pthread_mutex_destroy(&recall->lock);
  table_free(&recall->table);
  free(recall->weights);
  free(recall);
}

/* Return a text of up to `room` tokens, null if the allocation failed. */
Text *osd_text_new(int64_t room) {
  Text *text = calloc(1, sizeof(Text));
  if (!text) return NULL;
  text->room = room;
  for (text->heads = 64; text->heads < room; text->heads *= 2) continue;
  text->tokens = malloc((size_t)room * sizeof(int32_t));
  text->earlier = malloc((size_t)(room + 1) * sizeof(int32_t));
  text->latest = calloc((size_t)text->heads, sizeof(int32_t));
  const int64_t entries = ORDERS * room < TEXT_ENTRIES ? ORDERS * room : TEXT_ENTRIES;
  if (table_new(&text->table, entries) || !text->tokens || !text->earlier || !text->latest) {
    table_free(&text->table);
    free(text->tokens);
    free(text->earlier);
    free(text->latest);
    free(text);
    return NULL;
  }
  return text;
}

void osd_text_free(Text *text) {
  table_free(&text->table);
  free(text->tokens);
  free(text->earlier);
  free(text->latest);
  free(text);
}

void osd_text_clear(Text *text) {
  text->length = 0;
  memset(text->latest, 0, (size_t)text->heads * sizeof(int32_t));
  memset(text->table.places, 0, (size_t)text->table.sets * WAYS * sizeof(Place));
}

/* Return whether the text is these tokens. */
int osd_text_is(const Text *text, const int32_t *tokens, int64_t count) {
  return text->length == count && !memcmp(text->tokens, tokens, (size_t)count * sizeof(int32_t));
}

/* Write the last tokens of a text, the last one first; -1 before its beginning. */
static void tail_of(const Text *text, int32_t *tail) {
  for (int i = 0; i < TAIL; i++) tail[i] = i < text->length ? text->tokens[text->length - 1 - i] : -1;
}

static void follow(int32_t *tail, const int32_t *before, int32_t token) {
  memmove(tail + 1, before, (TAIL - 1) * sizeof(int32_t));
  tail[0] = token;
}

/* Append tokens; with `heard` the text's table learns each as if the target had given it probability 1. */
void osd_text_append(Text *text, const int64_t *tokens, int64_t count, int heard) {
  const float sure = 1;
  int32_t tail[TAIL];
  for (int64_t i = 0; i < count && text->length < text->room; i++) {
    if (heard && text->length) {
      uint64_t hashes[ORDERS];
      const Distribution target = {tokens + i, &sure, 1};
      tail_of(text, tail);
      learn_table(&text->table, hashes, hashes_of(tail, hashes), &target, 0, (uint32_t)text->length);
    }
    text->tokens[text->length++] = (int32_t)tokens[i];
    if (text->length >= COPIED) {
      uint64_t hash = 0;
      for (int64_t back = 1; back <= COPIED; back++) hash = mixed(hash, text->tokens[text->length - back]);
      int32_t *latest = text->latest + (hash & (uint64_t)(text->heads - 1));
      text->earlier[text->length] = *latest;
      *latest = (int32_t)text->length;
    }
  }
}

/* Learn the target's distributions after the end of a text and after the `count` nodes of a draft on it.
 *
 * `ids` and `logp` [1 + count, k] are the target's most probable tokens. `next` [1 + count] is the token that the output
 * continues with at this place, in the order of the text, and -1 elsewhere. `other_ids` and `other_p` [1 + count, KEPT] are
 * proposals of another drafter, -1 for no token; null without one. `scale` is 1 / temperature, 0 for greedy. Without
 * `keep` only the request's own table learns the distributions. */
void osd_recall_learn(Recall *recall, Text *text, int64_t count, const int64_t *tokens, const int64_t *parents,
                      const int64_t *ids, const float *logp, int64_t k, const int64_t *next, const int64_t *other_ids,
                      const float *other_p, float scale, int keep, uint32_t reader, uint32_t now) {
  int32_t(*tails)[TAIL] = malloc((size_t)(1 + count) * sizeof(*tails));
  int32_t *depths = malloc((size_t)(1 + count) * sizeof(int32_t));
  if (!tails || !depths) {
    free(tails);
    free(depths);
    return;
  }
  const int known = k < TARGET_TOKENS ? (int)k : TARGET_TOKENS, most = known < KEPT ? known : KEPT;
  Mixture m;
  for (int64_t row = 0; row <= count; row++) {
    if (row) {
      follow(tails[row], tails[1 + parents[row - 1]], (int32_t)tokens[row - 1]);
      depths[row] = depths[1 + parents[row - 1]] + 1;
    } else {
      tail_of(text, tails[0]);
      depths[0] = 0;
    }
    float p[TARGET_TOKENS];
    for (int i = 0; i < known; i++) p[i] = expf(logp[row * k + i]);
    const Distribution target = {ids + row * k, p, most}, whole = {ids + row * k, p, known};
    uint64_t hashes[ORDERS];
    const int orders = hashes_of(tails[row], hashes);
    pthread_mutex_lock(&recall->lock);
    if (next[row] >= 0) {
      Distribution other = {NULL, NULL, 0};
      if (other_ids) {
        other = (Distribution){other_ids + row * KEPT, other_p + row * KEPT, 0};
        while (other.count < KEPT && other.ids[other.count] >= 0) other.count++;
      }
      mix(recall, text, tails[row], &target, other.count ? &other : NULL, &m);
      calibrate(recall->weights, &m, (int32_t)next[row], depths[row], scale, &whole);
    }
    if (keep) learn_table(&recall->table, hashes, orders, &target, reader, now);
    pthread_mutex_unlock(&recall->lock);
    learn_table(&text->table, hashes, orders, &target, 0, (uint32_t)text->length);
  }
  free(tails);
  free(depths);
}

/* Learn tokens that the target put after a text with unknown distributions, each with probability 1, and append them. With
 * `drafted`, count the accuracy of the drafts that could have been made. */
void osd_recall_learn_tokens(Recall *recall, Text *text, const int32_t *tokens, int64_t count, int drafted,
                             uint32_t now) {
  const float sure = 1;
  Mixture m;
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = tokens[i];
    const Distribution target = {&token, &sure, 1};
    int32_t tail[TAIL];
    uint64_t hashes[ORDERS];
    tail_of(text, tail);
    const int orders = hashes_of(tail, hashes);
    pthread_mutex_lock(&recall->lock);
    if (drafted) {
      mix(recall, text, tail, &target, NULL, &m);
      calibrate(recall->weights, &m, tokens[i], (int)i, 0, &target);
    }
    learn_table(&recall->table, hashes, orders, &target, 0, now);
    pthread_mutex_unlock(&recall->lock);
    learn_table(&text->table, hashes, orders, &target, 0, (uint32_t)text->length);
    osd_text_append(text, &token, 1, 0);
  }
}

typedef struct {
  float worth;
  int32_t sequence, parent, token, level;
} Candidate;

static int before(const Candidate *a, const Candidate *b) { return a->worth > b->worth; }

static void raise_up(Candidate *heap, int64_t at, Candidate added) {
  for (; at && before(&added, heap + (at - 1) / 2); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
  heap[at] = added;
}

static Candidate take_best(Candidate *heap, int64_t *count) {
  const Candidate best = heap[0], last = heap[--*count];
  int64_t at = 0;
  for (int64_t child; (child = 2 * at + 1) < *count; at = child) {
    if (child + 1 < *count && before(heap + child + 1, heap + child)) child++;
    if (!before(heap + child, &last)) break;
    heap[at] = heap[child];
  }
  heap[at] = last;
  return best;
}

typedef struct {
  Recall *recall;
  const Text *text;
  int64_t limit;            /* most nodes */
  uint64_t seed, step;      /* keys of the draws */
  double scale;             /* 1 / temperature, 0 for greedy */
  const int64_t *path;      /* draft of another drafter, `levels` tokens; null without one */
  const int64_t *other_ids; /* [1 + levels, KEPT] its most probable tokens before and after each of them, -1 for none */
  const float *other_p;
  int64_t levels;
  const int64_t *ahead; /* `further` tokens that are certain to come before the first node; null without them */
  int64_t further;
  /* Mask [vocabulary] of the tokens allowed after a path of nodes, null if the path is not allowed. Null: no constraint. */
  const uint8_t *(*allowed)(const int32_t *path, int64_t length);
  int64_t vocabulary;
} DraftRequest;

/* The rows that a draft grows from: the roots of all sequences, then the nodes. Each row has its context, its number within
 * its sequence, its depth and its position on the other drafter's path (-1: it has left the path). */
typedef struct {
  int32_t (*tails)[TAIL];
  int32_t *number, *depth, *along, *size; /* `size`: number of nodes of each sequence */
  int32_t *after, *token, *path;          /* row before each node, its token, and a buffer for one path */
  Candidate *heap;
} Growing;

static void grow_free(Growing *g) {
  free(g->tails);
  free(g->number);
  free(g->heap);
}

/* Allocate rows and candidates; returns 1 if the allocation failed. */
static int grow_new(Growing *g, int64_t rows, int64_t candidates) {
  g->tails = malloc((size_t)rows * sizeof(*g->tails));
  g->number = malloc((size_t)rows * 7 * sizeof(int32_t));
  g->depth = g->number + rows;
  g->along = g->depth + rows;
  g->size = g->along + rows;
  g->after = g->size + rows;
  g->token = g->after + rows;
  g->path = g->token + rows;
  g->heap = malloc((size_t)(candidates + 1) * sizeof(Candidate));
  if (g->tails && g->number && g->heap) return 0;
  grow_free(g);
  return 1;
}

static void add_root(Growing *g, const DraftRequest *request, int64_t row) {
  tail_of(request->text, g->tails[row]);
  for (int64_t i = 0; i < request->further; i++) follow(g->tails[row], g->tails[row], (int32_t)request->ahead[i]);
  g->number[row] = -1;
  g->depth[row] = 0;
  g->along[row] = request->path || request->other_ids ? 0 : -1;
  g->size[row] = 0;
}

/* Add the node `row` of a sequence: `token` after the row `after`. */
static void add_node(Growing *g, const DraftRequest *request, int64_t sequence, int64_t row, int64_t after, int32_t token) {
  const int32_t place = g->along[after];
  follow(g->tails[row], g->tails[after], token);
  g->depth[row] = g->depth[after] + 1;
  g->after[row] = (int32_t)after;
  g->token[row] = token;
  const int on_path = place >= 0 && request->path && place < request->levels && request->path[place] == token;
  g->along[row] = on_path ? place + 1 : -1;
  g->number[row] = g->size[sequence]++;
}

/* Write the mixture after a row and the other drafter's proposals there. The caller holds the lock of the table. */
static void look(const Growing *g, const DraftRequest *request, int64_t row, Mixture *m, Distribution *other) {
  *other = (Distribution){NULL, NULL, 0};
  if (g->along[row] >= 0 && g->along[row] <= request->levels) {
    *other = (Distribution){request->other_ids + g->along[row] * KEPT, request->other_p + g->along[row] * KEPT, 0};
    while (other->count < KEPT && other->ids[other->count] >= 0) other->count++;
  }
  mix(request->recall, request->text, g->tails[row], NULL, other->count ? other : NULL, m);
}

/* Return the mask of the tokens allowed after a row, null if the row is not allowed. */
static const uint8_t *mask_of(const Growing *g, const DraftRequest *request, int64_t row) {
  const int32_t depth = g->depth[row];
  for (int32_t at = depth; at > 0; row = g->after[row]) g->path[--at] = g->token[row];
  return request->allowed(g->path, depth);
}

/* Return the only token that a mask allows, or -1. */
static int32_t only(const uint8_t *mask, int64_t vocabulary) {
  const uint8_t *first = mask ? memchr(mask, 1, (size_t)vocabulary) : NULL;
  if (!first) return -1;
  const int64_t token = first - mask;
  return memchr(first + 1, 1, (size_t)(vocabulary - token - 1)) ? -1 : (int32_t)token;
}

/* Remove the tokens that the mask forbids, and scale the rest up by the removed mass. */
static void restrict_to(Mixture *m, const uint8_t *mask, int64_t vocabulary) {
  float removed = 0, stays = 0;
  int count = 0;
  for (int i = 0; i < m->count; i++) {
    if (mask && m->ids[i] >= 0 && m->ids[i] < vocabulary && mask[m->ids[i]]) {
      m->ids[count] = m->ids[i];
      stays += m->q[count++] = m->q[i];
    } else {
      removed += m->q[i];
    }
  }
  m->count = count;
  for (int i = 0; i < count; i++) m->q[i] /= fmaxf(1 - removed, stays);
}

/* Draft the most probable nodes of several sequences, in descending order of their chances: at most `most` nodes, each with
 * a chance of at least `floor` to be accepted. With `chains` a node has at most one child. Under a constraint all nodes
 * are allowed ones, and a forced token is drafted without looking at the table.
 *
 * Writes for each node its sequence, parent (-1 for the root, else a number within the sequence), token, level and chance.
 * Returns the number of nodes, -1 if an allocation failed. */
int64_t osd_recall_draft(const DraftRequest *requests, int64_t sequences, int64_t most, float floor, int chains,
                         int64_t *owner, int64_t *parent, int64_t *token, int64_t *level, float *chance) {
  Growing g;
  if (grow_new(&g, sequences + most, (sequences + most) * CHILDREN)) return -1;
  int64_t waiting = 0, nodes = 0;
  Mixture m;
  Distribution other;
  for (int64_t row = 0; row < sequences + nodes; row++) {
    const int64_t node = row - sequences, s = node < 0 ? row : owner[node];
    const DraftRequest *request = requests + s;
    const float reach = node < 0 ? 1 : chance[node];
    if (node < 0) add_root(&g, request, row);
    const int grows = request->limit > 0 && !(node >= 0 && nodes >= most);
    const uint8_t *mask = grows && request->allowed ? mask_of(&g, request, row) : NULL;
    const int32_t forced = only(mask, request->vocabulary);
    if (forced >= 0) {
      raise_up(g.heap, waiting++, (Candidate){reach, (int32_t)s, (int32_t)row, forced, FORCED});
    } else if (grows) {
      pthread_mutex_lock(&request->recall->lock);
      look(&g, request, row, &m, &other);
      if (request->allowed) restrict_to(&m, mask, request->vocabulary);
      const int best = m.level < 0 ? 0 : sort_first(&m, chains ? 1 : CHILDREN);
      for (int rank = 0; rank < best; rank++) {
        const int mode = request->scale > 0 ? SAMPLED : 0;
        const float worth = reach * chance_of(request->recall->weights, &m, m.q[rank], rank, g.depth[row], mode);
        if (worth >= floor)
          raise_up(g.heap, waiting++,
                   (Candidate){worth, (int32_t)s, (int32_t)row, m.ids[rank], origin_of(&m, rank, &other)});
      }
      pthread_mutex_unlock(&request->recall->lock);
    }
    /* Expand all roots before the first node is taken, and each node before the next. */
    if (row < sequences - 1) continue;
    while (waiting && nodes < most) {
      const Candidate best = take_best(g.heap, &waiting);
      if (g.size[best.sequence] >= requests[best.sequence].limit) continue;
      owner[nodes] = best.sequence;
      parent[nodes] = g.number[best.parent];
      token[nodes] = best.token;
      level[nodes] = best.level;
      chance[nodes] = best.worth;
      add_node(&g, requests + best.sequence, best.sequence, sequences + nodes++, best.parent, best.token);
      break;
    }
  }
  grow_free(&g);
  return nodes;
}

/* Return the number of children of a row whose last child is drawn: one more is added while it raises the expected number
 * of accepted nodes by at least `floor`. Writes to `chances` [WIDEST] the chances of the chosen children. */
static int width_of(Weights *w, const Mixture *m, int kept, float scale, int depth, float reach, float floor, int most,
                    float *chances) {
  float chosen = 0, before = 0;
  int width = 0;
  for (int fixed = 0; fixed < WIDEST && fixed < kept && fixed < most; fixed++) {
    float q[KEPT];
    if (!drawable(m, kept, fixed, scale, q)) break;
    const float last = chance_of(w, m, q[0], fixed, depth, DRAWN);
    if (reach * (chosen + last - before) < floor) break;
    before = chosen + last;
    width = fixed + 1;
    chosen += chances[fixed] = chance_of(w, m, m->q[fixed], fixed, depth, SAMPLED);
  }
  return width;
}

/* Return the chance that the token drawn from q [count] after `fixed` chosen ones is accepted. A drawn token is accepted
 * with probability min(1, p / q); these are scaled to the counted total. */
static float chance_drawn(Weights *w, const Mixture *m, int fixed, int count, int drawn, const float *q, int depth) {
  float kept = 0, accepted = 0;
  for (int i = 0; i < count; i++) {
    const float p = chance_of(w, m, m->q[fixed + i], fixed + i, depth, SAMPLED), part = fminf(1, p / q[i]);
    kept += q[i] * part;
    if (i == drawn) accepted = part;
  }
  return fminf(1, accepted * chance_of(w, m, q[0], fixed, depth, DRAWN) / kept);
}

/* Draft for sampled sequences: the last child of each node is drawn from the mixture without the children before it. The
 * number of children is fixed before the draw, and no node is removed after it. Nodes grow in descending order of chance.
 *
 * Writes also, for each row (the roots, then the nodes), the number of its drawn child, or -1, and the distribution that
 * it was drawn from: tokens [KEPT] with their probabilities, 0 where there is no token. */
int64_t osd_recall_draw(const DraftRequest *requests, int64_t sequences, int64_t most, float floor, int64_t *owner,
                        int64_t *parent, int64_t *token, int64_t *level, float *chance, int64_t *child, int64_t *ids,
                        float *q) {
  Growing g;
  if (grow_new(&g, sequences + most, sequences + most)) return -1;
  int64_t waiting = 0, nodes = 0;
  Mixture m;
  Distribution other;
  for (int64_t row = 0; row < sequences; row++) {
    add_root(&g, requests + row, row);
    child[row] = -1;
    if (requests[row].limit > 0) raise_up(g.heap, waiting++, (Candidate){1, (int32_t)row, (int32_t)row, 0, 0});
  }
  while (waiting && nodes < most) {
    const Candidate at = take_best(g.heap, &waiting);
    const DraftRequest *request = requests + at.sequence;
    const int64_t row = at.parent;
    const float scale = (float)request->scale;
    const int64_t left = request->limit - g.size[at.sequence], room = left < most - nodes ? left : most - nodes;
    float chances[WIDEST], *shares = q + row * KEPT;
    int32_t tokens[WIDEST], levels[WIDEST];
    int width = 0;
    pthread_mutex_lock(&request->recall->lock);
    look(&g, request, row, &m, &other);
    if (m.level >= 0 && room > 0) {
      Weights *w = request->recall->weights;
      const int kept = sort_first(&m, KEPT);
      width = width_of(w, &m, kept, scale, g.depth[row], at.worth, floor, (int)room, chances);
      const int fixed = width - 1, count = width ? drawable(&m, kept, fixed, scale, shares) : 0;
      if (width) {
        child[row] = g.size[at.sequence] + fixed;
        double u = number(request->seed, request->step, DRAFT, (uint64_t)child[row]);
        int drawn = 0;
        while (drawn + 1 < count && (u -= shares[drawn]) >= 0) drawn++;
        chances[fixed] = chance_drawn(w, &m, fixed, count, drawn, shares, g.depth[row]);
        for (int i = 0; i < KEPT; i++) {
          ids[row * KEPT + i] = i < count ? m.ids[fixed + i] : 0;
          if (i >= count) shares[i] = 0;
        }
        for (int rank = 0; rank < width; rank++) {
          const int which = rank < fixed ? rank : fixed + drawn;
          tokens[rank] = m.ids[which];
          levels[rank] = origin_of(&m, which, &other);
        }
      }
    }
    pthread_mutex_unlock(&request->recall->lock);
    for (int rank = 0; rank < width; rank++) {
      const int64_t new = sequences + nodes;
      owner[nodes] = at.sequence;
      parent[nodes] = g.number[row];
      token[nodes] = tokens[rank];
      level[nodes] = levels[rank];
      chance[nodes++] = at.worth * chances[rank];
      child[new] = -1;
      add_node(&g, request, at.sequence, new, row, tokens[rank]);
      raise_up(g.heap, waiting++, (Candidate){chance[new - sequences], at.sequence, (int32_t)new, 0, 0});
    }
  }
  grow_free(&g);
  return nodes;
}

/* Write the mixture after the end of a text: up to `most` tokens and their probabilities; returns their number. */
int64_t osd_recall_predict(Recall *recall, const Text *text, int64_t most, int64_t *ids, float *q) {
  int32_t tail[TAIL];
  Mixture m;
  tail_of(text, tail);
  pthread_mutex_lock(&recall->lock);
  mix(recall, text, tail, NULL, NULL, &m);
  pthread_mutex_unlock(&recall->lock);
  const int count = sort_first(&m, (int)most);
  for (int i = 0; i < count; i++) {
    ids[i] = m.ids[i];
    q[i] = m.q[i];
  }
  return count;
}

/* Remove the entries last learnt before `oldest`, and entries that the request marked `reader` (0 for none) may have
 * touched; returns their number. */
int64_t osd_recall_drop(Recall *recall, uint32_t oldest, uint32_t reader) {
  int64_t dropped = 0;
  for (int64_t start = 0; start < recall->table.sets * WAYS; start += 1024 * WAYS) {
    pthread_mutex_lock(&recall->lock);
    for (int64_t at = start; at < start + 1024 * WAYS && at < recall->table.sets * WAYS; at++) {
      Place *place = recall->table.places + at;
      const int named = reader && (recall->table.entries[at].readers & reader) == reader;
      if (place->tag && (place->stamp < oldest || named)) {
        *place = (Place){0, 0};
        memset(recall->table.entries + at, 0, sizeof(Entry));
        dropped++;
      }
    }
    pthread_mutex_unlock(&recall->lock);
  }
  return dropped;
}

/* Return the number of entries in use. */
int64_t osd_recall_used(const Recall *recall) {
  int64_t used = 0;
  for (int64_t at = 0; at < recall->table.sets * WAYS; at++) used += recall->table.places[at].tag != 0;
  return used;
}

/* Copy a table's places, entries and weights out of it (`out`) or into it. */
void osd_recall_copy(Recall *recall, void *places, void *entries, void *weights, int out) {
  const Table *table = &recall->table;
  for (int64_t start = 0; start < table->sets; start += 1024) {
    const size_t count = (size_t)((table->sets - start < 1024 ? table->sets - start : 1024) * WAYS), at = (size_t)start * WAYS;
    pthread_mutex_lock(&recall->lock);
    char *held = (char *)(table->places + at), *copy = (char *)places + at * sizeof(Place);
    memcpy(out ? copy : held, out ? held : copy, count * sizeof(Place));
    held = (char *)(table->entries + at), copy = (char *)entries + at * sizeof(Entry);
    memcpy(out ? copy : held, out ? held : copy, count * sizeof(Entry));
    pthread_mutex_unlock(&recall->lock);
  }
  pthread_mutex_lock(&recall->lock);
  memcpy(out ? weights : (void *)recall->weights, out ? (void *)recall->weights : weights, sizeof(Weights));
  pthread_mutex_unlock(&recall->lock);
}
