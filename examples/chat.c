/* Two turns with a model, a stopped answer, token ids, and how likely a text is.
 *
 *   cc chat.c -I ../include -L ../target/release -lcactus -o chat && ./chat MY-BUNDLE
 */
#include <cactus.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void on_token(const char *text, uint32_t token_id, void *user) {
    (void)token_id;
    *(size_t *)user += strlen(text);
    fputs(text, stdout);
}

static void on_first_token(const char *text, uint32_t token_id, void *user) {
    (void)text;
    (void)token_id;
    cactus_stop(user);
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, cactus_get_last_error());
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: chat BUNDLE\n");
        return 2;
    }
    void *model = cactus_init(argv[1], NULL, false);
    if (!model) fail("init");

    static char answer[1 << 16];
    size_t streamed = 0;
    const char *question = "[{\"role\": \"user\", \"content\": \"Name a river.\"}]";
    const char *options = "{\"max_tokens\": 16, \"temperature\": 0}";
    if (cactus_complete(model, question, answer, sizeof answer, options, NULL, on_token, &streamed, NULL, 0) < 0)
        fail("complete");
    printf("\n%zu bytes came in pieces\n%s\n", streamed, answer);

    /* What was read of the first turn is known in the second. */
    const char *more = "[{\"role\": \"user\", \"content\": \"Name a river.\"}, {\"role\": \"assistant\", \"content\": \"The Elbe.\"},"
                       " {\"role\": \"user\", \"content\": \"And another one.\"}]";
    if (cactus_prefill(model, more, answer, sizeof answer, options, NULL, NULL, 0) < 0) fail("prefill");
    puts(answer);
    if (cactus_complete(model, more, answer, sizeof answer, options, NULL, NULL, NULL, NULL, 0) < 0) fail("complete");
    puts(answer);

    if (cactus_complete(model, question, answer, sizeof answer, "{\"max_tokens\": 4000}", NULL, on_first_token, model, NULL, 0) < 0)
        fail("stopped");
    puts(answer);
    cactus_reset(model);

    if (cactus_render_prompt(model, question, NULL, NULL, answer, sizeof answer) < 0) fail("render");
    puts(answer);

    size_t count = 0;
    const char *text = "The Elbe flows into the North Sea.";
    if (cactus_tokenize(model, text, NULL, 0, &count) != 0) fail("tokenize");
    uint32_t *ids = malloc(count * sizeof *ids);
    if (!ids || cactus_tokenize(model, text, ids, count, &count) != 0) fail("tokenize");
    if (cactus_score_window(model, ids, count, 1, count, count, answer, sizeof answer) < 0) fail("score");
    puts(answer);
    free(ids);

    /* A mistake is told, and the model is as good as before. */
    if (cactus_complete(model, "no JSON", answer, sizeof answer, NULL, NULL, NULL, NULL, NULL, 0) != -1) return 1;
    printf("%s\n%s\n", cactus_get_last_error(), answer);
    char small[8];
    if (cactus_complete(model, question, small, sizeof small, options, NULL, NULL, NULL, NULL, 0) != -1) return 1;
    puts(cactus_get_last_error());
    cactus_destroy(model);
    return 0;
}
