/* A Llama-shaped model, or some of its layers, in one call and one parallel region: nothing but arithmetic between
 * reading one weight and the next.
 */
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

/* What a forward is asked for: layers [first, stop), logits [asked, vocabulary] after the rows last[0..asked), and
 * tapped [rows, tap_count * hidden], of which layers outside are left alone. A forward that starts after the first layer
 * reads states [rows, hidden] instead of tokens; one that stops before the last gives `after` [rows, hidden] instead of
 * logits. */
typedef struct {
  const int64_t *tokens, *last;
  float *logits, *tapped;
  int64_t asked;
  const float *states;
  float *after;
  int64_t first, stop;
} Asked;

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
    for (int64_t l = asked->first; l < asked->stop; l++) {
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
    }
    if (asked->stop == shape->layers)
      to_logits(&m, shape, model->norm, &model->head, x, asked->last, asked->asked, own, asked->logits);
    else if (m.me == 0)
      memcpy(asked->after, x, (size_t)(rows * h) * 4);
  }
  free_space(&s);
  free(x);
  return 0;
}
