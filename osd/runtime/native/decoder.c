/* A whole Llama-shaped model in one call and one parallel region: nothing but arithmetic between reading one weight and
 * the next.
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

/* What a forward is asked for: logits [asked, vocabulary] after the rows last[0..asked), and tapped
 * [rows, tap_count * hidden]. */
typedef struct {
  const int64_t *tokens, *last;
  float *logits, *tapped;
  int64_t asked;
} Asked;

/* Embed the rows, run them through all layers and give what was asked for. `from` of the rows is filled in here. */
int osd_decoder(const Model *model, const Shape *shape, Rows *r, const Asked *asked) {
  const int64_t h = shape->hidden, rows = r->count;
  Space s;
  float *x;
  if (!rows) return 0;
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
    for (int64_t i; (i = take(&m, rows)) >= 0;)
      for (int64_t j = 0; j < h; j++)
        x[i * h + j] = read_element(model->embedding, asked->tokens[i] * h + j, model->embedding_dtype);
    meet(&m);
    for (int64_t l = 0; l < shape->layers; l++) {
      rms_norm(x, model->layers[l].input_norm, own.normed, rows, h, h, shape->eps, shape->norm_dtype);
      const Projections after = projections(model->layers + (l + 1 < shape->layers ? l + 1 : l), shape, h);
      const Step then = l + 1 < shape->layers ? step_of(&after.q, &after.k, &after.v, rows)
                                              : step_of(&model->head, NULL, NULL, asked->asked ? asked->asked : 1);
      run_layer(&m, model->layers + l, shape, r, &s, x, own, h, &then);
      /* x stays as it is until this thread reaches the next layer's meetings */
      for (int64_t t = 0; t < model->tap_count && m.me == 0; t++)
        if (model->taps[t] == l)
          for (int64_t i = 0; i < rows; i++)
            memcpy(asked->tapped + (i * model->tap_count + t) * h, x + i * h, (size_t)h * 4);
    }
    to_logits(&m, shape, model->norm, &model->head, x, asked->last, asked->asked, own, asked->logits);
  }
  free_space(&s);
  free(x);
  return 0;
}
