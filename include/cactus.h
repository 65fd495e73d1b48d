/* The C API of cactus, made from src/engine/ffi.rs. docs/c-api.md explains it. */

#ifndef CACTUS_H
#define CACTUS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// A piece of an answer, the id of the token that completed it, and what the caller gave along.
typedef void (*cactus_token_callback)(const char *text, uint32_t token_id, void *user);

// Level (0 debug, 1 info, 2 warning, 3 error), part of the program, message, and what the caller gave along.
typedef void (*cactus_log_callback)(int level, const char *component, const char *message, void *user);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Opens the bundle in the folder `model_path`, a chat model or an embedding model. Answers come from the files in
// `corpus_dir`, if that is not null; what was read of them is kept in its folder `.cactus` with `cache_index`. Null after an
// error.
//
// # Safety
// Strings are null or C strings.
void *cactus_init(const char *model_path,
                  const char *corpus_dir,
                  bool cache_index);

// Closes a model; null is allowed. Nothing else may be running with it.
//
// # Safety
// `model` is null or comes from [`cactus_init`], and is not used again.
void cactus_destroy(void *model);

// Forgets what was read.
//
// # Safety
// `model` is null or comes from [`cactus_init`].
void cactus_reset(void *model);

// Ends the answer that is being written; from any thread, also from the callback.
//
// # Safety
// `model` is null or comes from [`cactus_init`].
void cactus_stop(void *model);

// Answers a conversation. Bytes written, or -1.
//
// # Safety
// `model` comes from [`cactus_init`], strings are null or C strings, `buffer` has room for `size` bytes.
int cactus_complete(void *model,
                    const char *messages_json,
                    char *buffer,
                    size_t size,
                    const char *options_json,
                    const char *tools_json,
                    cactus_token_callback callback,
                    void *user,
                    const uint8_t *pcm,
                    size_t pcm_bytes);

// Reads a conversation, so that an answer to it begins sooner. Bytes written, or -1.
//
// # Safety
// As [`cactus_complete`].
int cactus_prefill(void *model,
                   const char *messages_json,
                   char *buffer,
                   size_t size,
                   const char *options_json,
                   const char *tools_json,
                   const uint8_t *pcm,
                   size_t pcm_bytes);

// The prompt that a conversation becomes. Its length, -1, or -2 when the buffer is too small.
//
// # Safety
// As [`cactus_complete`].
int cactus_render_prompt(void *model,
                         const char *messages_json,
                         const char *options_json,
                         const char *tools_json,
                         char *buffer,
                         size_t size);

// Token ids of a text. 0, -1, or -2 when there is no room; `count` is set to their number in both good cases. A null
// buffer only asks for it.
//
// # Safety
// `model` comes from [`cactus_init`], `out` is null or has room for `capacity` ids, `count` is null or valid.
int cactus_tokenize(void *model, const char *text, uint32_t *out, size_t capacity, size_t *count);

// Log-probability of the tokens `start..end`, seen from at most `context` tokens before them, as
// `{"success", "logprob", "tokens"}`. Bytes written, or -1.
//
// # Safety
// `model` comes from [`cactus_init`], `tokens` is valid for `count` ids, `buffer` has room for `size` bytes.
int cactus_score_window(void *model,
                        const uint32_t *tokens,
                        size_t count,
                        size_t start,
                        size_t end,
                        size_t context,
                        char *buffer,
                        size_t size);

// The vector of a text. Floats written, -1, or -2 when `bytes` are too few; `dim` is set to their number in both good cases. A
// null buffer only asks for it. The length is 1 with `normalize`.
//
// # Safety
// `model` comes from [`cactus_init`], `out` is null or has room for `bytes`, `dim` is null or valid.
int cactus_embed(void *model,
                 const char *text,
                 float *out,
                 size_t bytes,
                 size_t *dim,
                 bool normalize);

// The passages of the corpus that belong to a question, `top_k` at most (0: five), as
// `{"chunks": [{"score", "source", "content"}]}`; without a corpus there are none. Bytes written, or -1.
//
// # Safety
// As [`cactus_complete`].
int cactus_rag_query(void *model, const char *query, char *buffer, size_t size, size_t top_k);

// The last error of this thread; never null, and valid until its next call.
const char *cactus_get_last_error(void);

// Messages below `level` are not handed on: 0 debug, 1 info, 2 warning (default), 3 error, 4 none.
void cactus_log_set_level(int level);

// Who gets messages; null: nobody.
void cactus_log_set_callback(cactus_log_callback callback, void *user);

// Opens the index in the folder `dir` for vectors of `dim` values, or makes one. One at a time can have a folder open. Null
// after an error.
//
// # Safety
// `dir` is null or a C string.
void *cactus_index_init(const char *dir,
                        size_t dim);

// Adds `count` documents with their vectors of `dim` values, all or none. `metadatas` and its entries may be null. 0 or -1.
//
// # Safety
// `index` comes from [`cactus_index_init`]; the lists have `count` entries: ids, C strings, and pointers to `dim` values.
int cactus_index_add(void *index,
                     const int *ids,
                     const char *const *documents,
                     const char *const *metadatas,
                     const float *const *embeddings,
                     size_t count,
                     size_t dim);

// Deletes documents, all or none. 0 or -1.
//
// # Safety
// `index` comes from [`cactus_index_init`], `ids` has `count` entries.
int cactus_index_delete(void *index, const int *ids, size_t count);

// Reads documents. Every list of buffers may be null; the sizes are capacities before, and what each document takes after: bytes
// with the zero byte, and floats. 0 or -1, also when something does not fit.
//
// # Safety
// `index` comes from [`cactus_index_init`]; every list that is not null has `count` entries, and every buffer room for its size.
int cactus_index_get(void *index,
                     const int *ids,
                     size_t count,
                     char *const *document_buffers,
                     size_t *document_sizes,
                     char *const *metadata_buffers,
                     size_t *metadata_sizes,
                     float *const *embedding_buffers,
                     size_t *embedding_sizes);

// The documents nearest to each of `count` vectors of `dim` values, the nearest first. Options: `top_k` (10) and
// `score_threshold` (-1), a cosine. The sizes are capacities before, and numbers of results after; no more are given than fit.
// 0 or -1.
//
// # Safety
// `index` comes from [`cactus_index_init`]; all lists have `count` entries, vectors `dim` values, buffers room for their sizes.
int cactus_index_query(void *index,
                       const float *const *embeddings,
                       size_t count,
                       size_t dim,
                       const char *options_json,
                       int *const *id_buffers,
                       size_t *id_sizes,
                       float *const *score_buffers,
                       size_t *score_sizes);

// Writes the index anew without what was deleted. 0 or -1.
//
// # Safety
// `index` comes from [`cactus_index_init`].
int cactus_index_compact(void *index);

// Closes an index; null is allowed. Nothing else may be running with it.
//
// # Safety
// `index` is null or comes from [`cactus_index_init`], and is not used again.
void cactus_index_destroy(void *index);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CACTUS_H */
