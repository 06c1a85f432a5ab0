/* A Llama-shaped model, or some of its layers, in one call and one parallel region, so that reading the weights is never
 * interrupted by the interpreter.
 */
#include <float.h>

#include "layer.h"

/* Parts of a model outside its layers. */
typedef struct {
  const Layer *layers;
  const void *embedding;           /* [vocabulary, hidden] of embedding_dtype */
  const void *norm;                /* [hidden] of the shape's norm_dtype */
  Linear head;
  const int32_t *taps;             /* [tap_count] layers whose outputs are wanted */
  int64_t tap_count, window;       /* places that a row sees, its local included; 0: all */
  int32_t embedding_dtype;
} Model;

/* Early exits of a forward, see osd.runtime.exit_rule. Behind layers exits[0..count), row r leaves if EXIT is the most
 * probable decision of controller owners[r] of [controllers][3, hidden], with a probability above above[r]. The forward
 * ends at the first exit where a row leaves: `left` [rows] are the flags of these rows, `stop` is the number of layers. */
typedef struct {
  const int32_t *exits;
  const float *controllers;
  const int32_t *owners;
  const float *above;
  int32_t *left;
  int64_t count, stop;
} ExitRule;

/* Inputs and results of a forward through the layers [first, stop): logits [wanted, vocabulary] after the rows
 * last[0..wanted), and tapped [rows, tap_count * hidden], unchanged for other layers. A forward that starts after the
 * first layer reads states [rows, hidden] instead of tokens. A forward that stops before the last layer returns `after`
 * [rows, hidden] instead of logits. With `exit_rule`, which may be null, it may stop earlier. */
typedef struct {
  const int64_t *tokens, *last;
  float *logits, *tapped;
  int64_t wanted;
  const float *states;
  float *after;
  int64_t first, stop;
  ExitRule *exit_rule;
} ForwardCall;

enum { STOPS = 0, LEAVES = 1, GOES_ON = 2 }; /* decisions of a controller, see osd.runtime.exit_controller */

/* Return whether row `row` of x [rows, hidden] leaves behind `layers` layers; all members get the same result. */
static int leaves(const ExitRule *l, const float *x, int64_t row, int64_t hidden, int64_t layers) {
  int exit = 0;
  for (int64_t i = 0; i < l->count; i++) exit |= l->exits[i] == layers;
  if (!exit || l->above[row] >= 1.0f) return 0;
  const float *const state = x + row * hidden, *const controller = l->controllers + l->owners[row] * 3 * hidden;
  const float scale = 1.0f / sqrtf(product(state, state, hidden) / (float)hidden + FLT_EPSILON);
  float odds[3];
  for (int i = 0; i < 3; i++) odds[i] = scale * product(state, controller + i * hidden, hidden);
  const float leave = odds[LEAVES], stop = odds[STOPS] - leave, on = odds[GOES_ON] - leave;
  return stop < 0 && on < 0 && 1.0f / (1.0f + expf(stop) + expf(on)) > l->above[row];
}

/* Run a forward. Sets `from` of the rows. Returns 1 if an allocation failed. */
int osd_forward(const Model *model, const Shape *shape, Rows *r, const ForwardCall *call) {
  const int64_t h = shape->hidden, rows = r->count;
  Space s;
  float *x;
  if (!rows) return 0;
  if (model->window) r->selection = NULL; /* a sliding window reads few places */
  if (posix_memalign((void **)&x, 64, (size_t)(rows * (4 * h + 4)))) return 1;
  if (make_space(&s, shape, r, rows > call->wanted ? rows : call->wanted, h)) {
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
    const LocalSpace local = local_space(&m, &s);
    for (int64_t i; (i = take(&m, rows)) >= 0;) {
      if (call->first)
        memcpy(x + i * h, call->states + i * h, (size_t)h * 4);
      else
        for (int64_t j = 0; j < h; j++)
          x[i * h + j] = read_element(model->embedding, call->tokens[i] * h + j, model->embedding_dtype);
    }
    meet(&m);
    int64_t stop = call->stop;
    for (int64_t l = call->first; l < stop; l++) {
      rms_norm(x, model->layers[l].input_norm, local.normed, rows, h, h, shape->eps, shape->norm_dtype);
      const Projections after = projections(model->layers + (l + 1 < call->stop ? l + 1 : l), shape, h);
      const Step then = l + 1 < call->stop      ? step_of(&after.q, &after.k, &after.v, rows)
                        : l + 1 < shape->layers ? (Step){0}
                                                : step_of(&model->head, NULL, NULL, call->wanted ? call->wanted : 1);
      run_layer(&m, model->layers + l, l, shape, r, &s, x, local, h, &then);
      /* x does not change before this thread reaches the next layer's meetings */
      for (int64_t t = 0; t < model->tap_count && m.me == 0; t++)
        if (model->taps[t] == l)
          for (int64_t i = 0; i < rows; i++)
            memcpy(call->tapped + (i * model->tap_count + t) * h, x + i * h, (size_t)h * 4);
      for (int64_t i = 0; call->exit_rule && i < rows; i++)
        if (leaves(call->exit_rule, x, i, h, l + 1)) stop = l + 1;
    }
    if (m.me == 0 && call->exit_rule) {
      ExitRule *const exit_rule = call->exit_rule;
      exit_rule->stop = stop;
      for (int64_t i = 0; i < rows; i++) exit_rule->left[i] = leaves(exit_rule, x, i, h, stop);
    }
    if (stop == shape->layers)
      to_logits(&m, shape, model->norm, &model->head, x, call->last, call->wanted, local, call->logits);
    else if (m.me == 0)
      memcpy(call->after, x, (size_t)(rows * h) * 4);
  }
  free_space(&s);
  free(x);
  return 0;
}

/* Store the keys and values that one layer computes from states [rows, hidden], without running the layers before it. */
static void fill_layer(const Member *m, const Layer *layer, const Shape *shape, const Rows *r, Space *s,
                       const float *states, LocalSpace local) {
  const int64_t h = shape->hidden, rows = r->count;
  const Projections p = projections(layer, shape, h);
  const Step reads = step_of(&p.k, &p.v, NULL, rows);
  float *const outputs[2] = {s->k, s->v};
  rms_norm(states, layer->input_norm, local.normed, rows, h, h, shape->eps, shape->norm_dtype);
  const Input in = osd_input(local.normed, rows, h, p.k.dtype, local.narrow);
  for (int64_t item; (item = take(m, reads.count)) >= 0;) {
    const char *next = reads_on(m, &reads, NULL, rows, item);
    const int which = layer_at(&reads, &item);
    osd_linear_chunk(reads.layers[which], &in, outputs[which], rows, item, REPLACE, FLOAT32, next);
  }
  meet(m);
  for (int64_t item; (item = take(m, rows * shape->kv_heads)) >= 0;) keep(layer, shape, r, s, item);
  meet(m);
}

/* Store the keys and values that each of the layers [first, stop) computes from the same states [rows, hidden]. */
int osd_fill(const Model *model, const Shape *shape, Rows *r, const float *states, int64_t first, int64_t stop) {
  Space s;
  if (!r->count || first >= stop) return 0;
  int32_t *from = calloc((size_t)r->count, sizeof *from); /* no row attends */
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
    const LocalSpace local = local_space(&m, &s);
    for (int64_t l = first; l < stop; l++) fill_layer(&m, model->layers + l, shape, r, &s, states, local);
  }
  free_space(&s);
  free(from);
  return 0;
}
