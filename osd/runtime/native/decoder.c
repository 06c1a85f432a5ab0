/* A Llama-shaped model, or some of its layers, in one call and one parallel region: nothing but arithmetic between
 * reading one weight and the next.
 */
#include <float.h>

#include "layer.h"

/* What a model has beside its layers. */
typedef struct {
  const Layer *layers;
  const void *embedding;           /* [vocabulary, hidden] of embedding_dtype */
  const void *norm;                /* [hidden] of the shape's norm_dtype */
  Linear head;
  const int32_t *taps;             /* [tap_count] layers whose outputs are asked for */
  int64_t tap_count, window;       /* a row sees so many places, itself included; 0: all */
  int32_t embedding_dtype;
} Model;

/* Who may leave a forward, see osd.runtime.leaving: behind layers exits[0..count), row r where controller owners[r] of
 * [controllers][3, hidden] says EXIT before anything else, more probably than above[r]. It ends where any row does: `left`
 * [rows] says which, and `stop` behind how many layers. */
typedef struct {
  const int32_t *exits;
  const float *controllers;
  const int32_t *owners;
  const float *above;
  int32_t *left;
  int64_t count, stop;
} Leaving;

/* What a forward is asked for: layers [first, stop), logits [asked, vocabulary] after the rows last[0..asked), and
 * tapped [rows, tap_count * hidden], of which layers outside are left alone. A forward that starts after the first layer
 * reads states [rows, hidden] instead of tokens; one that stops before the last gives `after` [rows, hidden] instead of
 * logits. With `leaving`, which may be null, it may stop earlier. */
typedef struct {
  const int64_t *tokens, *last;
  float *logits, *tapped;
  int64_t asked;
  const float *states;
  float *after;
  int64_t first, stop;
  Leaving *leaving;
} Asked;

enum { STOPS = 0, LEAVES = 1, GOES_ON = 2 }; /* what a controller may say, see osd.runtime.exit_controller */

/* Whether row `row` of x [rows, hidden] leaves behind so many layers; every member finds the same. */
static int leaves(const Leaving *l, const float *x, int64_t row, int64_t hidden, int64_t layers) {
  int exit = 0;
  for (int64_t i = 0; i < l->count; i++) exit |= l->exits[i] == layers;
  if (!exit || l->above[row] >= 1.0f) return 0;
  const float *const state = x + row * hidden, *const controller = l->controllers + l->owners[row] * 3 * hidden;
  const float scale = 1.0f / sqrtf(product(state, state, hidden) / (float)hidden + FLT_EPSILON);
  float odds[3];
  for (int i = 0; i < 3; i++) odds[i] = scale * product(state, controller + i * hidden, hidden);
  const float mine = odds[LEAVES], stop = odds[STOPS] - mine, on = odds[GOES_ON] - mine;
  return stop < 0 && on < 0 && 1.0f / (1.0f + expf(stop) + expf(on)) > l->above[row];
}

/* Run the rows through the layers and give what was asked for. `from` of the rows is filled in here. */
int osd_forward(const Model *model, const Shape *shape, Rows *r, const Asked *asked) {
  const int64_t h = shape->hidden, rows = r->count;
  Space s;
  float *x;
  if (!rows) return 0;
  if (model->window) r->selection = NULL; /* what slides reads little anyway */
  if (posix_memalign((void **)&x, 64, (size_t)(rows * (4 * h + 4)))) return 1;
  if (make_space(&s, shape, r, rows > asked->asked ? rows : asked->asked, h)) {
    free(x);
    return 1;
  }
  int32_t *from = (int32_t *)(x + rows * h);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t first = model->window ? r->positions[i] - (model->window - 1) : 0;
    from[i] = first > 0 ? (int32_t)first : 0;
  }
  r->from = from;
  Team team = {0};
#pragma omp parallel num_threads(shape->threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    const Own own = own_space(&m, &s);
    for (int64_t i; (i = take(&m, rows)) >= 0;) {
      if (asked->first)
        memcpy(x + i * h, asked->states + i * h, (size_t)h * 4);
      else
        for (int64_t j = 0; j < h; j++)
          x[i * h + j] = read_element(model->embedding, asked->tokens[i] * h + j, model->embedding_dtype);
    }
    meet(&m);
    int64_t stop = asked->stop;
    for (int64_t l = asked->first; l < stop; l++) {
      rms_norm(x, model->layers[l].input_norm, own.normed, rows, h, h, shape->eps, shape->norm_dtype);
      const Projections after = projections(model->layers + (l + 1 < asked->stop ? l + 1 : l), shape, h);
      const Step then = l + 1 < asked->stop   ? step_of(&after.q, &after.k, &after.v, rows)
                        : l + 1 < shape->layers ? (Step){0}
                                                : step_of(&model->head, NULL, NULL, asked->asked ? asked->asked : 1);
      run_layer(&m, model->layers + l, l, shape, r, &s, x, own, h, &then);
      /* x stays as it is until this thread reaches the next layer's meetings */
      for (int64_t t = 0; t < model->tap_count && m.me == 0; t++)
        if (model->taps[t] == l)
          for (int64_t i = 0; i < rows; i++)
            memcpy(asked->tapped + (i * model->tap_count + t) * h, x + i * h, (size_t)h * 4);
      for (int64_t i = 0; asked->leaving && i < rows; i++)
        if (leaves(asked->leaving, x, i, h, l + 1)) stop = l + 1;
    }
    if (m.me == 0 && asked->leaving) {
      Leaving *const leaving = asked->leaving;
      leaving->stop = stop;
      for (int64_t i = 0; i < rows; i++) leaving->left[i] = leaves(leaving, x, i, h, stop);
    }
    if (stop == shape->layers)
      to_logits(&m, shape, model->norm, &model->head, x, asked->last, asked->asked, own, asked->logits);
    else if (m.me == 0)
      memcpy(asked->after, x, (size_t)(rows * h) * 4);
  }
  free_space(&s);
  free(x);
  return 0;
}

/* What one layer keeps of states [rows, hidden] that did not run through those before it: their keys and values, as if
 * they stood there. `normed` is the member's own. */
static void fill_layer(const Member *m, const Layer *layer, const Shape *shape, const Rows *r, Space *s,
                       const float *states, Own own) {
  const int64_t h = shape->hidden, rows = r->count;
  const Projections p = projections(layer, shape, h);
  const Step reads = step_of(&p.k, &p.v, NULL, rows);
  float *const outputs[2] = {s->k, s->v};
  rms_norm(states, layer->input_norm, own.normed, rows, h, h, shape->eps, shape->norm_dtype);
  const Input in = osd_input(own.normed, rows, h, p.k.dtype, own.narrow);
  for (int64_t item; (item = take(m, reads.count)) >= 0;) {
    const char *next = reads_on(m, &reads, NULL, rows, item);
    const int which = layer_at(&reads, &item);
    osd_linear_chunk(reads.layers[which], &in, outputs[which], rows, item, REPLACE, FLOAT32, next);
  }
  meet(m);
  for (int64_t item; (item = take(m, rows * shape->kv_heads)) >= 0;) keep(layer, shape, r, s, item);
  meet(m);
}

/* Store what layers [first, stop) keep of states [rows, hidden], each as if these came before it. */
int osd_fill(const Model *model, const Shape *shape, Rows *r, const float *states, int64_t first, int64_t stop) {
  Space s;
  if (!r->count || first >= stop) return 0;
  int32_t *from = calloc((size_t)r->count, sizeof *from); /* nothing is attended to */
  if (!from) return 1;
  r->from = from;
  r->selection = NULL;
  if (make_space(&s, shape, r, r->count, shape->hidden)) {
    free(from);
    return 1;
  }
  Team team = {0};
#pragma omp parallel num_threads(shape->threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    const Own own = own_space(&m, &s);
    for (int64_t l = first; l < stop; l++) fill_layer(&m, model->layers + l, shape, r, &s, states, own);
  }
  free_space(&s);
  free(from);
  return 0;
}
