/*
 * Train a small language-model agent: read tokens, sample, differentiate the clipped loss, update the weights.
 *
 * In: token ids and advantages from js/. Out: sampled tokens with their log-probabilities, gradients, new weights.
 * The decoder is the one of model/decoder.py (Qwen2: pre-norm, rotary positions, SwiGLU, tied output), the loss is
 * policy_loss of training/losses.py, the update is AdamW, and in the cold start Muon. tests/test_trainer.py compares each
 * of them with PyTorch.
 *
 * The bits of every result are equal on every machine. WebAssembly rounds + - * / and sqrt as IEEE 754 says, so three
 * rules are enough: no import from outside (exp, log, cos are written here), no "relaxed" instruction, and sums in an
 * order that depends on the task alone, never on the number of workers or on what else is in a batch.
 *
 * Read it from top to bottom. Next: js/learn.js, a training step, which calls these functions through js/trainer.js.
 *
 * Letters: n tokens, D width, H heads, V vocabulary. Matrices are stored by rows; W[out][in], as in PyTorch.
 */
#include <wasm_simd128.h>

#define EXPORT(name) __attribute__((export_name(name)))

enum {
    D = 128,      /* width of the residual stream */
    H = 4,        /* heads; each has its own keys and values */
    HEAD = D / H, /* width of a head */
    INNER = 256,  /* width inside the feed-forward part */
    WORDS = 757,  /* vocabulary */
    V = 760,      /* the same with three rows of zeros, because products go eight columns at a time */
    LAYERS = 2,
    CONTEXT = 320, /* longest row in tokens */
    QKV = 3 * D,
    LONGEST_SUM = 256 /* tokens that a weight gradient adds up at a time, so that they stay in the cache */
};
#define BETA_1 0.9 /* of AdamW: how much of the momentum an update keeps */
#define MUON_MOMENTUM 0.95f
#define MUON_ROUNDS 5    /* of its polynomial: a singular value of .001 has then become .47 */
#define MUON_LENGTH 0.2f /* root mean square of its step in learning rates, as AdamW's usually is */
#define NORM_EPS 1e-6f
#define ATTENTION_SCALE 0.17677669f /* 1 / sqrt(HEAD) */
#define LOWEST (-1e30f)             /* below every score, and still finite */

/* ---------------------------------------------------------------------------------------------------- memory */

/* Memory is a stack: `allocate` takes from its top, and `release` gives back all that came after a `mark`. */
extern unsigned char __heap_base;
static unsigned long top;

EXPORT("allocate") void *allocate(unsigned long bytes) {
    if (top == 0) top = ((unsigned long)&__heap_base + 63) & ~63UL;
    unsigned long start = top;
    top = (top + bytes + 63) & ~63UL;
    unsigned long pages = (top + 65535) / 65536, have = __builtin_wasm_memory_size(0);
    /* Without memory the caller gets 0, and says so. */
    if (pages > have && __builtin_wasm_memory_grow(0, pages - have) == (unsigned long)-1) {
        top = start;
        return 0;
    }
    return (void *)start;
}

EXPORT("mark") unsigned long mark(void) { return top; }
EXPORT("release") void release(unsigned long mark) { top = mark; }

static float *floats(unsigned long count) { return allocate(4 * count); }

static void clear(float *x, unsigned long count) {
    for (unsigned long i = 0; i < count; i++) x[i] = 0;
}

/* ----------------------------------------------------------------------------- four numbers at a time, exp, log */

typedef v128_t Four;

static inline Four load(const float *x) { return wasm_v128_load(x); }
static inline void store(float *x, Four value) { wasm_v128_store(x, value); }
static inline Four four(float x) { return wasm_f32x4_splat(x); }
static inline Four add(Four a, Four b) { return wasm_f32x4_add(a, b); }
static inline Four subtract(Four a, Four b) { return wasm_f32x4_sub(a, b); }
static inline Four times(Four a, Four b) { return wasm_f32x4_mul(a, b); }
/* Two roundings. A fused multiply-add has one, and only some processors have it: equal bits forbid it. */
static inline Four times_add(Four a, Four b, Four c) { return add(times(a, b), c); }
static inline float sum_of(Four a) {
    return wasm_f32x4_extract_lane(a, 0) + wasm_f32x4_extract_lane(a, 1) + wasm_f32x4_extract_lane(a, 2) +
           wasm_f32x4_extract_lane(a, 3);
}

/* exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, and a polynomial for exp(r) (Cephes); error below 2e-7 of the value. */
static inline Four exp_of(Four x) {
    x = wasm_f32x4_min(wasm_f32x4_max(x, four(-87.0f)), four(88.0f));
    Four n = wasm_f32x4_nearest(times(x, four(1.44269504f)));
    Four r = times_add(n, four(-0.693359375f), x); /* ln(2) in two parts: the first product is exact */
    r = times_add(n, four(2.12194440e-4f), r);
    Four p = four(1.9875691500e-4f);
    p = times_add(p, r, four(1.3981999507e-3f));
    p = times_add(p, r, four(8.3334519073e-3f));
    p = times_add(p, r, four(4.1665795894e-2f));
    p = times_add(p, r, four(1.6666665459e-1f));
    p = times_add(p, r, four(5.0000001201e-1f));
    p = times_add(times(p, r), r, add(r, four(1.0f)));
    Four exponent = wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n), wasm_i32x4_splat(127));
    return times(p, wasm_i32x4_shl(exponent, 23));
}

static float exp_of_one(float x) { return wasm_f32x4_extract_lane(exp_of(four(x)), 0); }

/* log(x) = e ln(2) + log(m) with m in [sqrt(1/2), sqrt(2)), and a polynomial for log(m) (Cephes). x > 0. */
static float log_of(float x) {
    union {
        float value;
        unsigned bits;
    } number = {x};
    int e = (int)(number.bits >> 23) - 126;
    number.bits = (number.bits & 0x7fffff) | 0x3f000000;
    float m = number.value;
    if (m < 0.70710678f) {
        e--;
        m = m + m;
    }
    m = m - 1.0f;
    float square = m * m, y = 7.0376836292e-2f;
    y = y * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * square - 2.12194440e-4f * (float)e - 0.5f * square;
    return m + y + 0.693359375f * (float)e;
}

/* ------------------------------------------------------------------------------------------ products of matrices */

/*
 * The right operand B[K][N] is packed first: panels of eight columns, each with its K rows one after the other. The
 * inner loop of `multiply` then reads memory in order, where plain loops would jump a row ahead for each number.
 */
static void pack(const float *b, int row, int K, int N, float *panels) {
    for (int column = 0; column < N; column += 8)
        for (int k = 0; k < K; k++, panels += 8) {
            store(panels, load(b + k * row + column));
            store(panels + 4, load(b + k * row + column + 4));
        }
}

/* Pack the transpose of b[N][K]: for y = x W^T. Rows from `rows` on count as zeros. */
static void pack_transposed(const float *b, int row, int K, int N, int rows, float *panels) {
    for (int column = 0; column < N; column += 8)
        for (int k = 0; k < K; k++, panels += 8)
            for (int i = 0; i < 8; i++) panels[i] = column + i < rows ? b[(column + i) * row + k] : 0;
}

/*
 * C = A B, or C += A B with `accumulate`. A[m][k] is at a[m * a_row + k * a_column], so A may be a transpose.
 * Each number of C is one sum over k in order, whatever the other rows are: a token's result does not depend on its
 * batch. Four rows of C at a time, because their eight sums fill the registers of the processor.
 */
static void multiply(const float *a, int a_row, int a_column, const float *panels, float *c, int c_row, int M, int N,
                     int K, int accumulate) {
    for (int column = 0; column < N; column += 8, panels += 8 * K) {
        int m = 0;
        for (; m + 4 <= M; m += 4) {
            const float *x = a + m * a_row, *b = panels;
            float *out = c + m * c_row + column;
            Four s[4][2];
            for (int i = 0; i < 4; i++) {
                s[i][0] = accumulate ? load(out + i * c_row) : four(0);
                s[i][1] = accumulate ? load(out + i * c_row + 4) : four(0);
            }
            for (int k = 0; k < K; k++, b += 8, x += a_column) {
                Four left = load(b), right = load(b + 4);
                for (int i = 0; i < 4; i++) {
                    Four value = wasm_v128_load32_splat(x + i * a_row);
                    s[i][0] = times_add(value, left, s[i][0]);
                    s[i][1] = times_add(value, right, s[i][1]);
                }
            }
            for (int i = 0; i < 4; i++) {
                store(out + i * c_row, s[i][0]);
                store(out + i * c_row + 4, s[i][1]);
            }
        }
        for (; m < M; m++) {
            const float *x = a + m * a_row, *b = panels;
            float *out = c + m * c_row + column;
            Four left = accumulate ? load(out) : four(0), right = accumulate ? load(out + 4) : four(0);
            for (int k = 0; k < K; k++, b += 8, x += a_column) {
                Four value = wasm_v128_load32_splat(x);
                left = times_add(value, load(b), left);
                right = times_add(value, load(b + 4), right);
            }
            store(out, left);
            store(out + 4, right);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ the parameters */

/* Where each parameter begins in the vector of all weights; js/trainer.js has the same list with PyTorch's names. */
enum {
    NORM_1 = 0, /* within a layer: the norm before the attention */
    W_QKV = NORM_1 + D,
    B_QKV = W_QKV + QKV * D,
    W_OUT = B_QKV + QKV,
    NORM_2 = W_OUT + D * D, /* the norm before the feed-forward part */
    W_GATE_UP = NORM_2 + D,
    W_DOWN = W_GATE_UP + 2 * INNER * D,
    LAYER_SIZE = W_DOWN + D * INNER,
    EMBED = 0, /* within the whole: the embedding, which is the output matrix too */
    FIRST_LAYER = EMBED + V * D,
    NORM_LAST = FIRST_LAYER + LAYERS * LAYER_SIZE,
    PARAMETERS = NORM_LAST + D
};

static float *weights, *gradient, *total, *moment_1, *moment_2;
static double beta_1_power, beta_2_power; /* BETA_1^t and beta_2^t after t updates */
static float *cosines, *sines;            /* [CONTEXT][HEAD / 2] */

/* Weights as panels: for y = x W^T (forward) and for dx = dy W (back). */
static struct {
    float *qkv, *out, *gate_up, *down;
} forward[LAYERS], back[LAYERS];
static float *logits_forward, *logits_back;

EXPORT("parameters") int parameters(void) { return PARAMETERS; }
EXPORT("weights") float *weights_(void) { return weights; }
EXPORT("gradient") float *gradient_(void) { return gradient; }
EXPORT("total") float *total_(void) { return total; }
EXPORT("moment_1") float *moment_1_(void) { return moment_1; }
EXPORT("moment_2") float *moment_2_(void) { return moment_2; }

/* cos and sin by their series, in float64: the engines of browsers differ in the last bits of theirs. */
static void turn(double angle, float *cosine, float *sine) {
    const double TURN = 6.283185307179586;
    angle -= TURN * __builtin_rint(angle / TURN);
    double term = 1, c = 0, s = 0;
    for (int i = 1; i <= 34; i += 2) {
        c += term;
        term = term * angle / i;
        s += term;
        term = -term * angle / (i + 1);
    }
    *cosine = (float)c;
    *sine = (float)s;
}

/* 10000^(-2k / HEAD) in float32, as PyTorch has them. */
static const float FREQUENCIES[HEAD / 2] = {
    1.0f,           0.562341332f,    0.316227764f,    0.177827939f,   0.100000001f,   0.0562341325f,
    0.0316227749f,  0.0177827943f,   0.00999999978f,  0.00562341325f, 0.00316227763f, 0.00177827943f,
    0.00100000005f, 0.000562341302f, 0.000316227757f, 0.00017782794f,
};

/* Begin a run: no gradient, no momentum. */
EXPORT("forget") void forget(void) {
    clear(gradient, PARAMETERS);
    clear(total, PARAMETERS);
    clear(moment_1, PARAMETERS);
    clear(moment_2, PARAMETERS);
    beta_1_power = beta_2_power = 1;
}

/* Take the memory that is always needed. Returns 0 without enough of it. */
EXPORT("setup") int setup(void) {
    float **vectors[] = {&weights, &gradient, &total, &moment_1, &moment_2};
    for (int i = 0; i < 5; i++) {
        *vectors[i] = floats(PARAMETERS);
        if (*vectors[i] == 0) return 0;
    }
    forget();
    for (int layer = 0; layer < LAYERS; layer++) {
        forward[layer].qkv = floats(QKV * D), back[layer].qkv = floats(QKV * D);
        forward[layer].out = floats(D * D), back[layer].out = floats(D * D);
        forward[layer].gate_up = floats(2 * INNER * D), back[layer].gate_up = floats(2 * INNER * D);
        forward[layer].down = floats(D * INNER), back[layer].down = floats(D * INNER);
    }
    logits_forward = floats(V * D), logits_back = floats(V * D);
    cosines = floats(CONTEXT * HEAD / 2), sines = floats(CONTEXT * HEAD / 2);
    for (int t = 0; t < CONTEXT; t++)
        for (int k = 0; k < HEAD / 2; k++)
            turn((float)t * FREQUENCIES[k], &cosines[t * HEAD / 2 + k], &sines[t * HEAD / 2 + k]);
    return sines != 0;
}

/* Pack the weights again, after they changed. */
EXPORT("pack_weights") void pack_weights(void) {
    for (int layer = 0; layer < LAYERS; layer++) {
        const float *w = weights + FIRST_LAYER + layer * LAYER_SIZE;
        pack_transposed(w + W_QKV, D, D, QKV, QKV, forward[layer].qkv);
        pack_transposed(w + W_OUT, D, D, D, D, forward[layer].out);
        pack_transposed(w + W_GATE_UP, D, D, 2 * INNER, 2 * INNER, forward[layer].gate_up);
        pack_transposed(w + W_DOWN, INNER, INNER, D, D, forward[layer].down);
        pack(w + W_QKV, D, QKV, D, back[layer].qkv);
        pack(w + W_OUT, D, D, D, back[layer].out);
        pack(w + W_GATE_UP, D, 2 * INNER, D, back[layer].gate_up);
        pack(w + W_DOWN, INNER, D, INNER, back[layer].down);
    }
    pack_transposed(weights + EMBED, D, D, V, V, logits_forward);
    pack(weights + EMBED, D, V, D, logits_back);
}

/* --------------------------------------------------------------------------------------------- the parts of a block */

/* y = x / rms(x) * w. `scale` keeps 1 / rms(x) of each token for the way back. */
static void norm(const float *x, const float *w, float *y, float *scale, int n) {
    for (int t = 0; t < n; t++, x += D, y += D) {
        Four squares = four(0);
        for (int i = 0; i < D; i += 4) squares = times_add(load(x + i), load(x + i), squares);
        scale[t] = 1.0f / __builtin_sqrtf(sum_of(squares) / D + NORM_EPS);
        for (int i = 0; i < D; i += 4) store(y + i, times(times(load(x + i), four(scale[t])), load(w + i)));
    }
}

/* Add the gradients of `norm` to dx and dw:  dx = s (dy w) - x s^3 mean(dy w x). */
static void norm_back(const float *x, const float *w, const float *scale, const float *dy, float *dx, float *dw,
                      int n) {
    for (int t = 0; t < n; t++, x += D, dy += D, dx += D) {
        Four s = four(scale[t]), dot = four(0);
        for (int i = 0; i < D; i += 4) {
            Four product = times(load(dy + i), load(x + i));
            dot = times_add(product, load(w + i), dot);
            store(dw + i, times_add(product, s, load(dw + i)));
        }
        Four shared = four(sum_of(dot) * scale[t] * scale[t] * scale[t] / D);
        for (int i = 0; i < D; i += 4) {
            Four own = times(times(load(dy + i), load(w + i)), s);
            store(dx + i, add(load(dx + i), subtract(own, times(load(x + i), shared))));
        }
    }
}

/* Rotate the pairs (i, i + HEAD / 2) of queries and keys by their position's angle; direction -1 turns back. */
static void rotate(float *qkv, const int *positions, int n, float direction) {
    for (int t = 0; t < n; t++, qkv += QKV) {
        const float *cosine = cosines + positions[t] * HEAD / 2, *sine = sines + positions[t] * HEAD / 2;
        for (int head = 0; head < 2 * H; head++) {
            float *first = qkv + head * HEAD, *second = first + HEAD / 2;
            for (int i = 0; i < HEAD / 2; i += 4) {
                Four a = load(first + i), b = load(second + i), c = load(cosine + i);
                Four s = times(load(sine + i), four(direction));
                store(first + i, subtract(times(a, c), times(b, s)));
                store(second + i, add(times(b, c), times(a, s)));
            }
        }
    }
}

static Four sigmoid(Four x) { return wasm_f32x4_div(four(1), add(four(1), exp_of(wasm_f32x4_neg(x)))); }

/* out = silu(gate) up, where silu(x) = x sigmoid(x). A token's row has the gate, then up. */
static void swiglu(const float *gate_up, float *out, int n) {
    for (int t = 0; t < n; t++, gate_up += 2 * INNER, out += INNER)
        for (int i = 0; i < INNER; i += 4) {
            Four gate = load(gate_up + i), up = load(gate_up + INNER + i);
            store(out + i, times(times(gate, sigmoid(gate)), up));
        }
}

/* silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x))) */
static void swiglu_back(const float *gate_up, const float *dgated, float *dgate_up, int n) {
    for (int t = 0; t < n; t++, gate_up += 2 * INNER, dgate_up += 2 * INNER, dgated += INNER)
        for (int i = 0; i < INNER; i += 4) {
            Four gate = load(gate_up + i), up = load(gate_up + INNER + i), d = load(dgated + i);
            Four s = sigmoid(gate);
            Four slope = times(s, times_add(gate, subtract(four(1), s), four(1)));
            store(dgate_up + i, times(times(d, up), slope));
            store(dgate_up + INNER + i, times(d, times(gate, s)));
        }
}

/* What a block computes for n tokens. Training keeps it for the way back. */
typedef struct {
    float *x, *normed_1, *scale_1, *qkv, *attended, *middle, *normed_2, *scale_2, *gate_up, *gated;
    float *probabilities; /* of the attention: for each sequence and head [n][n rounded up to 8] */
} Block;

static void allocate_block(Block *block, int n) {
    block->x = floats(n * D);
    block->normed_1 = floats(n * D);
    block->scale_1 = floats(n);
    block->qkv = floats(n * QKV);
    block->attended = floats(n * D);
    block->middle = floats(n * D);
    block->normed_2 = floats(n * D);
    block->scale_2 = floats(n);
    block->gate_up = floats(n * 2 * INNER);
    block->gated = floats(n * INNER);
}

static void embed(const int *ids, float *x, int n) {
    for (int t = 0; t < n; t++)
        for (int i = 0; i < D; i += 4) store(x + t * D + i, load(weights + EMBED + ids[t] * D + i));
}

/* x -> queries, keys and values, rotated. */
static void before_attention(Block *b, int layer, const int *positions, int n) {
    const float *w = weights + FIRST_LAYER + layer * LAYER_SIZE;
    norm(b->x, w + NORM_1, b->normed_1, b->scale_1, n);
    multiply(b->normed_1, D, 1, forward[layer].qkv, b->qkv, QKV, n, QKV, D, 0);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < QKV; i += 4)
            store(b->qkv + t * QKV + i, add(load(b->qkv + t * QKV + i), load(w + B_QKV + i)));
    rotate(b->qkv, positions, n, 1);
}

/* x, attended -> the input of the next block. */
static void after_attention(Block *b, int layer, float *next, int n) {
    const float *w = weights + FIRST_LAYER + layer * LAYER_SIZE;
    for (int i = 0; i < n * D; i += 4) store(b->middle + i, load(b->x + i));
    multiply(b->attended, D, 1, forward[layer].out, b->middle, D, n, D, D, 1);
    norm(b->middle, w + NORM_2, b->normed_2, b->scale_2, n);
    multiply(b->normed_2, D, 1, forward[layer].gate_up, b->gate_up, 2 * INNER, n, 2 * INNER, D, 0);
    swiglu(b->gate_up, b->gated, n);
    for (int i = 0; i < n * D; i += 4) store(next + i, load(b->middle + i));
    multiply(b->gated, INNER, 1, forward[layer].down, next, D, n, D, INNER, 1);
}

/* Turn the first `visible` scores of a row into probabilities, and the rest of the row into zeros. */
static void softmax(float *scores, int visible, int width) {
    float most = LOWEST;
    for (int j = 0; j < visible; j++) most = scores[j] > most ? scores[j] : most;
    for (int j = visible; j < width; j++) scores[j] = LOWEST;
    Four sum = four(0);
    int end = (visible + 3) & ~3;
    for (int j = 0; j < end; j += 4) {
        Four value = exp_of(subtract(load(scores + j), four(most)));
        sum = add(sum, value);
        store(scores + j, value);
    }
    float inverse = 1.0f / sum_of(sum);
    for (int j = 0; j < end; j += 4) store(scores + j, times(load(scores + j), four(inverse)));
    for (int j = visible; j < width; j++) scores[j] = 0;
}

/* Set the columns of the logits that belong to no token. */
static void set_padding(float *logits, float value) {
    for (int i = WORDS; i < V; i++) logits[i] = value;
}

/* ------------------------------------------------------------------------------------------------------ decoding */

/* Keys and values of each conversation (slot): [slot][layer][CONTEXT][D]. They stay across turns. */
static float *keys, *values;

EXPORT("open_cache") int open_cache(int slots) {
    unsigned long size = (unsigned long)slots * LAYERS * CONTEXT * D;
    keys = floats(size);
    values = floats(size);
    return keys != 0 && values != 0;
}

/* The attempts at one question share its prompt: it is read once, and copied. */
EXPORT("copy_cache") void copy_cache(int from, int to, int length) {
    for (int layer = 0; layer < LAYERS; layer++) {
        unsigned long source = ((unsigned long)from * LAYERS + layer) * CONTEXT * D;
        unsigned long target = ((unsigned long)to * LAYERS + layer) * CONTEXT * D;
        for (int i = 0; i < length * D; i += 4) {
            store(keys + target + i, load(keys + source + i));
            store(values + target + i, load(values + source + i));
        }
    }
}

/* One token attends to all tokens of its slot so far. */
static void attend_in_cache(const float *query, const float *k, const float *v, int visible, float *out) {
    float scores[CONTEXT + 8];
    for (int head = 0; head < H; head++) {
        Four q[HEAD / 4], mean[HEAD / 4];
        for (int i = 0; i < HEAD / 4; i++) q[i] = load(query + head * HEAD + 4 * i), mean[i] = four(0);
        for (int j = 0; j < visible; j++) {
            Four dot = four(0);
            for (int i = 0; i < HEAD / 4; i++) dot = times_add(q[i], load(k + j * D + head * HEAD + 4 * i), dot);
            scores[j] = sum_of(dot) * ATTENTION_SCALE;
        }
        softmax(scores, visible, (visible + 7) & ~7);
        for (int j = 0; j < visible; j++)
            for (int i = 0; i < HEAD / 4; i++)
                mean[i] = times_add(four(scores[j]), load(v + j * D + head * HEAD + 4 * i), mean[i]);
        for (int i = 0; i < HEAD / 4; i++) store(out + head * HEAD + 4 * i, mean[i]);
    }
}

/*
 * Sample from softmax(logits / temperature): the token at which the cumulative distribution passes `uniform`.
 * Temperature 0 takes the most likely token, measured at temperature 1. Overwrites the logits.
 */
static int sample_token(float *logits, float temperature, float uniform, float *logprob) {
    int token = 0;
    for (int i = 1; i < WORDS; i++)
        if (logits[i] > logits[token]) token = i;
    Four most = four(logits[token]), inverse = four(1.0f / (temperature > 0 ? temperature : 1.0f)), sum = four(0);
    set_padding(logits, LOWEST);
    for (int i = 0; i < V; i += 4) {
        Four value = exp_of(times(subtract(load(logits + i), most), inverse));
        store(logits + i, value);
        sum = add(sum, value);
    }
    float whole = sum_of(sum);
    if (temperature > 0) {
        float left = uniform * whole;
        for (token = 0; token < WORDS - 1; token++) {
            left -= logits[token];
            if (left < 0) break;
        }
    }
    *logprob = log_of(logits[token]) - log_of(whole);
    return token;
}

/*
 * Read n tokens (ids, each with its slot and position; those of a slot in order), then sample a token after each of
 * the m tokens that `rows` names.
 */
EXPORT("read")
void read_tokens(int n, const int *ids, const int *slots, const int *positions, int m, const int *rows,
                 const float *uniforms, float temperature, int *tokens, float *logprobs) {
    unsigned long before = mark();
    Block block;
    allocate_block(&block, n);
    float *next = floats(n * D);
    embed(ids, block.x, n);
    for (int layer = 0; layer < LAYERS; layer++) {
        before_attention(&block, layer, positions, n);
        /* All keys first: a token of the same call may be in the past of another. */
        for (int t = 0; t < n; t++) {
            unsigned long place = (((unsigned long)slots[t] * LAYERS + layer) * CONTEXT + positions[t]) * D;
            for (int i = 0; i < D; i += 4) {
                store(keys + place + i, load(block.qkv + t * QKV + D + i));
                store(values + place + i, load(block.qkv + t * QKV + 2 * D + i));
            }
        }
        for (int t = 0; t < n; t++) {
            unsigned long place = ((unsigned long)slots[t] * LAYERS + layer) * CONTEXT * D;
            attend_in_cache(block.qkv + t * QKV, keys + place, values + place, positions[t] + 1,
                            block.attended + t * D);
        }
        after_attention(&block, layer, next, n);
        for (int i = 0; i < n * D; i += 4) store(block.x + i, load(next + i));
    }
    float *last = floats(m * D), *normed = floats(m * D), *scale = floats(m), *logits = floats(m * V);
    for (int k = 0; k < m; k++)
        for (int i = 0; i < D; i += 4) store(last + k * D + i, load(block.x + rows[k] * D + i));
    norm(last, weights + NORM_LAST, normed, scale, m);
    multiply(normed, D, 1, logits_forward, logits, V, m, V, D, 0);
    for (int k = 0; k < m; k++) tokens[k] = sample_token(logits + k * V, temperature, uniforms[k], logprobs + k);
    release(before);
}

/* --------------------------------------------------------------------------------------- attention, for training */

static int round_up(int n) { return (n + 7) & ~7; }

/* Multiply rows of a causal matrix: 32 rows at a time, with the columns up to their diagonal only. */
static void multiply_causal(const float *a, int a_row, const float *panels, float *c, int n, int K) {
    for (int row = 0; row < n; row += 32) {
        int end = row + 32 < n ? row + 32 : n;
        multiply(a + row * a_row, a_row, 1, panels, c + row * round_up(n), round_up(n), end - row, round_up(end), K, 0);
    }
}

/* The tokens of a sequence attend to themselves and to all before them. */
static void attend(const float *qkv, float *probabilities, float *out, int n, float *panels) {
    int width = round_up(n);
    for (int head = 0; head < H; head++, probabilities += n * width) {
        const float *q = qkv + head * HEAD, *k = q + D, *v = k + D;
        pack_transposed(k, QKV, HEAD, width, n, panels);
        multiply_causal(q, QKV, panels, probabilities, n, HEAD);
        for (int t = 0; t < n; t++) {
            float *row = probabilities + t * width;
            for (int j = 0; j <= t; j++) row[j] *= ATTENTION_SCALE;
            softmax(row, t + 1, width);
        }
        pack(v, QKV, n, HEAD, panels);
        multiply(probabilities, width, 1, panels, out + head * HEAD, D, n, HEAD, n, 0);
    }
}

/* From dattended, the gradient of the output, to those of queries, keys and values. `dscores` is room for n x n. */
static void attend_back(const float *qkv, const float *probabilities, const float *dattended, float *dqkv, int n,
                        float *panels, float *dscores) {
    int width = round_up(n);
    for (int head = 0; head < H; head++, probabilities += n * width) {
        const float *q = qkv + head * HEAD, *k = q + D, *v = k + D, *d = dattended + head * HEAD;
        float *dq = dqkv + head * HEAD, *dk = dq + D, *dv = dk + D;
        pack(d, D, n, HEAD, panels); /* dV = P^T dO */
        multiply(probabilities, 1, width, panels, dv, QKV, n, HEAD, n, 0);
        pack_transposed(v, QKV, HEAD, width, n, panels); /* dP = dO V^T */
        multiply_causal(d, D, panels, dscores, n, HEAD);
        for (int t = 0; t < n; t++) { /* dS = P (dP - sum(P dP)), and the scale of the scores */
            const float *p = probabilities + t * width;
            float *row = dscores + t * width;
            int end = (t + 4) & ~3; /* t + 1 visible tokens; the probabilities after them are 0 */
            Four dot = four(0);
            for (int j = 0; j < end; j += 4) dot = times_add(load(p + j), load(row + j), dot);
            Four mean = four(sum_of(dot));
            for (int j = 0; j < end; j += 4) {
                Four own = times(load(p + j), subtract(load(row + j), mean));
                store(row + j, times(own, four(ATTENTION_SCALE)));
            }
            for (int j = end; j < width; j++) row[j] = 0;
        }
        pack(k, QKV, n, HEAD, panels); /* dQ = dS K */
        multiply(dscores, width, 1, panels, dq, QKV, n, HEAD, n, 0);
        pack(q, QKV, n, HEAD, panels); /* dK = dS^T Q */
        multiply(dscores, 1, width, panels, dk, QKV, n, HEAD, n, 0);
    }
}

/* ---------------------------------------------------------------------------------------------------- the gradient */

/* dW += dy^T x, in pieces of LONGEST_SUM tokens. dy[n][out], x[n][in], dW[out][in]. */
static void weight_gradient(const float *dy, int out, const float *x, int in, float *dw, int n, float *panels) {
    for (int start = 0; start < n; start += LONGEST_SUM) {
        int count = n - start < LONGEST_SUM ? n - start : LONGEST_SUM;
        pack(x + start * in, in, count, in, panels);
        multiply(dy + start * out, 1, out, panels, dw, in, out, in, count, 1);
    }
}

typedef struct {
    float clip_low, clip_high, clip_dual; /* of policy_loss in training/losses.py */
    float temperature;                    /* of the trainer's distribution; the sampler's, or it is a bug */
    float kl;                             /* weight of KL(policy || reference), k3 */
    int imitate;                          /* maximise log-probabilities (cold start): no ratio, no clip */
} Loss;

/* The loss of one token, and its derivative by the token's log-probability. */
static float token_loss(const Loss *loss, float logprob, float old, float reference, float advantage, float *slope) {
    if (loss->imitate) {
        *slope = -advantage;
        return -advantage * logprob;
    }
    float log_ratio = logprob - old;
    int bounded = log_ratio > 20 || log_ratio < -20; /* exp(20) = 5e8: finite, and far beyond any clip */
    float ratio = exp_of_one(log_ratio > 20 ? 20 : log_ratio < -20 ? -20 : log_ratio);
    float low = 1 - loss->clip_low, high = 1 + loss->clip_high;
    float value = -advantage * ratio;
    float clipped = -advantage * (ratio < low ? low : ratio > high ? high : ratio);
    *slope = bounded ? 0 : value; /* the derivative of exp(x) is exp(x) */
    if (clipped > value) {
        value = clipped;
        *slope = 0;
    }
    float bound = -advantage * loss->clip_dual;
    if (loss->clip_dual > 1 && advantage < 0 && value > bound) {
        value = bound;
        *slope = 0;
    }
    if (loss->kl != 0) { /* k3 = exp(d) - d - 1 with d = log(reference / policy): never negative */
        float d = reference - logprob, e = exp_of_one(d);
        value += loss->kl * (e - d - 1);
        *slope += loss->kl * (1 - e);
    }
    return value;
}

/* Log-probabilities of the a action tokens, their loss, and the gradient of the logits in their place. */
static float loss_and_slope(float *logits, int a, const int *targets, const float *advantages, const float *old,
                            const float *reference, const float *token_weights, const Loss *loss, float *logprobs) {
    float sum = 0;
    for (int k = 0; k < a; k++, logits += V) {
        float most = logits[0], inverse = 1.0f / loss->temperature, slope;
        set_padding(logits, LOWEST);
        for (int i = 1; i < V; i++) most = logits[i] > most ? logits[i] : most;
        float chosen = (logits[targets[k]] - most) * inverse;
        Four whole = four(0);
        for (int i = 0; i < V; i += 4) {
            Four value = exp_of(times(subtract(load(logits + i), four(most)), four(inverse)));
            store(logits + i, value);
            whole = add(whole, value);
        }
        float denominator = sum_of(whole);
        set_padding(logits, 0); /* exp_of(LOWEST) is 1e-38; a gradient of 0 keeps these rows at zero */
        logprobs[k] = chosen - log_of(denominator);
        sum += token_weights[k] * token_loss(loss, logprobs[k], old[k], reference[k], advantages[k], &slope);
        slope *= token_weights[k] * inverse;
        /* d logprob / d logits = onehot - probabilities */
        Four factor = four(-slope / denominator);
        for (int i = 0; i < V; i += 4) store(logits + i, times(load(logits + i), factor));
        logits[targets[k]] += slope;
    }
    return sum;
}

/* Backpropagate dx, the gradient of a block's output, through the block. dx becomes the gradient of its input. */
static void block_back(const Block *b, int layer, const int *positions, int sequences, const int *starts, float *dx,
                       float *panels, float *dscores) {
    unsigned long before = mark();
    int n = starts[sequences];
    const float *w = weights + FIRST_LAYER + layer * LAYER_SIZE;
    float *g = gradient + FIRST_LAYER + layer * LAYER_SIZE;
    float *dgated = floats(n * INNER), *dgate_up = floats(n * 2 * INNER), *dnormed = floats(n * D);
    float *dattended = floats(n * D), *dqkv = floats(n * QKV);

    /* The feed-forward part. The residual stream carries dx past it, and norm_back adds what comes through. */
    weight_gradient(dx, D, b->gated, INNER, g + W_DOWN, n, panels);
    multiply(dx, D, 1, back[layer].down, dgated, INNER, n, INNER, D, 0);
    swiglu_back(b->gate_up, dgated, dgate_up, n);
    weight_gradient(dgate_up, 2 * INNER, b->normed_2, D, g + W_GATE_UP, n, panels);
    multiply(dgate_up, 2 * INNER, 1, back[layer].gate_up, dnormed, D, n, D, 2 * INNER, 0);
    norm_back(b->middle, w + NORM_2, b->scale_2, dnormed, dx, g + NORM_2, n);

    /* The attention. */
    weight_gradient(dx, D, b->attended, D, g + W_OUT, n, panels);
    multiply(dx, D, 1, back[layer].out, dattended, D, n, D, D, 0);
    const float *probabilities = b->probabilities;
    for (int s = 0; s < sequences; s++) {
        int start = starts[s], length = starts[s + 1] - start;
        attend_back(b->qkv + start * QKV, probabilities, dattended + start * D, dqkv + start * QKV, length, panels,
                    dscores);
        probabilities += H * length * round_up(length);
    }
    rotate(dqkv, positions, n, -1);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < QKV; i += 4) store(g + B_QKV + i, add(load(g + B_QKV + i), load(dqkv + t * QKV + i)));
    weight_gradient(dqkv, QKV, b->normed_1, D, g + W_QKV, n, panels);
    multiply(dqkv, QKV, 1, back[layer].qkv, dnormed, D, n, D, QKV, 0);
    norm_back(b->x, w + NORM_1, b->scale_1, dnormed, dx, g + NORM_1, n);
    release(before);
}

/*
 * Add the gradient of the loss to `gradient`, and return the loss.
 *
 * The rows lie one after the other: tokens starts[s] to starts[s + 1] are row s. `at` names the a tokens *before* the
 * action tokens, because a token's logits are at the position of the token before it; `targets` are the actions.
 * `token_weights` say how much each action counts, which decides how the loss is averaged. Without `learn`, only the
 * log-probabilities are computed.
 */
EXPORT("differentiate")
float differentiate(int sequences, const int *starts, const int *ids, const int *positions, int a, const int *at,
                    const int *targets, const float *advantages, const float *old, const float *reference,
                    const float *token_weights, float clip_low, float clip_high, float clip_dual, float temperature,
                    float kl, int imitate, int learn, float *logprobs) {
    unsigned long before = mark();
    Loss loss = {clip_low, clip_high, clip_dual, temperature, kl, imitate};
    int n = starts[sequences], longest = 0;
    unsigned long pairs = 0;
    for (int s = 0; s < sequences; s++) {
        int length = starts[s + 1] - starts[s];
        longest = length > longest ? length : longest;
        pairs += (unsigned long)H * length * round_up(length);
    }
    /* Panels hold at most LONGEST_SUM tokens of the widest layer, or the keys of one head. */
    float *panels = floats(LONGEST_SUM * 2 * INNER), *dscores = floats((unsigned long)longest * round_up(longest));

    Block blocks[LAYERS];
    for (int layer = 0; layer < LAYERS; layer++) {
        allocate_block(&blocks[layer], n);
        blocks[layer].probabilities = floats(pairs);
    }
    float *output = floats(n * D);
    embed(ids, blocks[0].x, n);
    for (int layer = 0; layer < LAYERS; layer++) {
        Block *b = &blocks[layer];
        before_attention(b, layer, positions, n);
        float *probabilities = b->probabilities;
        for (int s = 0; s < sequences; s++) {
            int start = starts[s], length = starts[s + 1] - start;
            attend(b->qkv + start * QKV, probabilities, b->attended + start * D, length, panels);
            probabilities += H * length * round_up(length);
        }
        after_attention(b, layer, layer + 1 < LAYERS ? blocks[layer + 1].x : output, n);
    }

    /* Logits at the actions only: three tokens in four were read, and have no loss. */
    float *last = floats(a * D), *normed = floats(a * D), *scale = floats(a), *logits = floats((unsigned long)a * V);
    for (int k = 0; k < a; k++)
        for (int i = 0; i < D; i += 4) store(last + k * D + i, load(output + at[k] * D + i));
    norm(last, weights + NORM_LAST, normed, scale, a);
    multiply(normed, D, 1, logits_forward, logits, V, a, V, D, 0);
    float value = loss_and_slope(logits, a, targets, advantages, old, reference, token_weights, &loss, logprobs);
    if (learn) {
        float *dnormed = floats(a * D), *dlast = floats(a * D), *dx = floats(n * D);
        weight_gradient(logits, V, normed, D, gradient + EMBED, a, panels);
        multiply(logits, V, 1, logits_back, dnormed, D, a, D, V, 0);
        clear(dlast, a * D);
        norm_back(last, weights + NORM_LAST, scale, dnormed, dlast, gradient + NORM_LAST, a);
        clear(dx, n * D);
        for (int k = 0; k < a; k++)
            for (int i = 0; i < D; i += 4) {
                float *sum = dx + at[k] * D + i;
                store(sum, add(load(sum), load(dlast + k * D + i)));
            }
        for (int layer = LAYERS - 1; layer >= 0; layer--)
            block_back(&blocks[layer], layer, positions, sequences, starts, dx, panels, dscores);
        /* The embedding is the output matrix too, so it has two gradients. */
        for (int t = 0; t < n; t++)
            for (int i = 0; i < D; i += 4) {
                float *g = gradient + EMBED + ids[t] * D + i;
                store(g, add(load(g), load(dx + t * D + i)));
            }
    }
    release(before);
    return value;
}

/* ------------------------------------------------------------------------------------------------------ the update */

/* Add a shard's gradient to the total. A step has a fixed number of shards, added in order: any number of workers
 * may compute them, and the sum has the same bits. */
EXPORT("add_shard") void add_shard(void) {
    for (int i = 0; i < PARAMETERS; i += 4) store(total + i, add(load(total + i), load(gradient + i)));
    clear(gradient, PARAMETERS);
}

/* Go on after some updates, whose momentum another worker had. */
EXPORT("count_updates") void count_updates(int updates, double beta_2) {
    beta_1_power = beta_2_power = 1;
    for (int i = 0; i < updates; i++) beta_1_power *= BETA_1, beta_2_power *= beta_2;
}

/*
 * Bring the singular values of x[D][columns] near 1 (cold_start/muon.py). With X = U S V^T, (X X^T) X is U S^3 V^T, so
 * each round applies a s + b s^3 + c s^5 to them. `y` is room for another x, and `panels` too.
 */
static void orthogonalize(float *x, int columns, float *y, float *panels) {
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    int size = D * columns;
    double squares = 0;
    for (int i = 0; i < size; i++) squares += (double)x[i] * x[i];
    float norm = (float)__builtin_sqrt(squares);
    float inverse = 1.0f / (norm > 1e-7f ? norm : 1e-7f);
    for (int i = 0; i < size; i++) x[i] *= inverse;
    float *product = floats(D * D), *polynomial = floats(D * D);
    for (int round = 0; round < MUON_ROUNDS; round++) {
        pack_transposed(x, columns, columns, D, D, panels);
        multiply(x, columns, 1, panels, product, D, D, D, columns, 0); /* X X^T */
        pack(product, D, D, D, panels);
        multiply(product, D, 1, panels, polynomial, D, D, D, D, 0);
        for (int i = 0; i < D * D; i++) polynomial[i] = b * product[i] + c * polynomial[i];
        pack(x, columns, D, columns, panels);
        multiply(polynomial, D, 1, panels, y, columns, D, columns, D, 0);
        for (int i = 0; i < size; i++) x[i] = a * x[i] + y[i];
    }
}

/* Take a Muon step with a matrix of rows x columns, at `place` in the vector of all weights. */
static void update_matrix(int place, int rows, int columns, float scale, float lr, float decay) {
    unsigned long before = mark();
    int transposed = rows > columns; /* the shorter side of each matrix is D, and X X^T has the shorter side */
    int size = rows * columns, longest = transposed ? rows : columns;
    float *x = floats(size), *y = floats(size), *panels = floats(size);
    float *w = weights + place, *m = moment_1 + place, *g = total + place;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            int i = row * columns + column;
            float slope = g[i] * scale;
            m[i] = MUON_MOMENTUM * m[i] + (1 - MUON_MOMENTUM) * slope;
            /* Nesterov's look ahead: the newest gradient counts once more. */
            float ahead = MUON_MOMENTUM * m[i] + (1 - MUON_MOMENTUM) * slope;
            x[transposed ? column * rows + row : i] = ahead;
        }
    orthogonalize(x, longest, y, panels);
    float length = MUON_LENGTH * __builtin_sqrtf((float)longest);
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            int i = row * columns + column;
            w[i] = (1 - lr * decay) * w[i] - lr * length * x[transposed ? column * rows + row : i];
        }
    release(before);
}

/* Take AdamW steps (1711.05101) with `count` weights from `place` on. */
static void update_each(int place, int count, float scale, float lr, double beta_2, float decay) {
    float keep_1 = (float)BETA_1, new_1 = (float)(1 - BETA_1), keep_2 = (float)beta_2, new_2 = (float)(1 - beta_2);
    float correct_1 = (float)(1 - beta_1_power), correct_2 = (float)(1 - beta_2_power);
    for (int i = place; i < place + count; i++) {
        float g = total[i] * scale;
        moment_1[i] = keep_1 * moment_1[i] + new_1 * g;
        moment_2[i] = keep_2 * moment_2[i] + new_2 * g * g;
        float move = lr * (moment_1[i] / correct_1) / (__builtin_sqrtf(moment_2[i] / correct_2) + 1e-8f);
        weights[i] = (1 - lr * decay) * weights[i] - move;
    }
}

/*
 * Clip the total gradient to a norm, take the optimiser's step, and clear the total. Each step takes the share lr x decay
 * from every weight. With a `matrix_lr` above 0 the layers' matrices take Muon's step with that rate, and only the rest
 * AdamW's. Returns the norm before clipping; if it is not finite, the weights stay as they are.
 */
EXPORT("update") float update(float lr, float largest_norm, double beta_2, float decay, float matrix_lr) {
    double squares = 0;
    for (int i = 0; i < PARAMETERS; i++) squares += (double)total[i] * total[i];
    float length = (float)__builtin_sqrt(squares);
    if (!(length <= 3e38f)) return length;
    float scale = length > largest_norm ? largest_norm / (length + 1e-6f) : 1;
    beta_1_power *= BETA_1;
    beta_2_power *= beta_2;
    if (matrix_lr > 0) {
        update_each(EMBED, V * D, scale, lr, beta_2, decay);
        for (int layer = 0; layer < LAYERS; layer++) {
            int first = FIRST_LAYER + layer * LAYER_SIZE;
            update_each(first + NORM_1, D, scale, lr, beta_2, decay);
            update_matrix(first + W_QKV, QKV, D, scale, matrix_lr, decay);
            update_each(first + B_QKV, QKV, scale, lr, beta_2, decay);
            update_matrix(first + W_OUT, D, D, scale, matrix_lr, decay);
            update_each(first + NORM_2, D, scale, lr, beta_2, decay);
            update_matrix(first + W_GATE_UP, 2 * INNER, D, scale, matrix_lr, decay);
            update_matrix(first + W_DOWN, D, INNER, scale, matrix_lr, decay);
        }
        update_each(NORM_LAST, D, scale, lr, beta_2, decay);
    } else {
        update_each(0, PARAMETERS, scale, lr, beta_2, decay);
    }
    clear(total, PARAMETERS);
    pack_weights();
    return length;
}
