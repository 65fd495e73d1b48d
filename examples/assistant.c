/* A call of a tool, an answer from files, and vectors of texts.
 *
 *   cc assistant.c -I ../include -L ../target/release -lcactus -o assistant && ./assistant MY-BUNDLE MY-FILES MY-INDEX
 */
#include <cactus.h>
#include <stdio.h>
#include <stdlib.h>

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, cactus_get_last_error());
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: assistant BUNDLE FILES INDEX\n");
        return 2;
    }
    static char answer[1 << 16];

    /* Tools: the model must call, and is then told what came of it. */
    void *model = cactus_init(argv[1], NULL, false);
    if (!model) fail("init");
    const char *tools = "[{\"type\": \"function\", \"function\": {\"name\": \"set_light\", \"parameters\": {\"type\": \"object\","
                        " \"properties\": {\"on\": {\"type\": \"boolean\"}}, \"required\": [\"on\"], \"additionalProperties\": false}}}]";
    const char *question = "[{\"role\": \"user\", \"content\": \"Switch the light on.\"}]";
    if (cactus_complete(model, question, answer, sizeof answer, "{\"force_tools\": true, \"max_tokens\": 200}", tools, NULL, NULL, NULL, 0) < 0)
        fail("complete");
    puts(answer);
    const char *second = "[{\"role\": \"user\", \"content\": \"Switch the light on.\"}, {\"role\": \"assistant\", \"content\": \"\", \"tool_calls\":"
                         " [{\"id\": \"1\", \"type\": \"function\", \"function\": {\"name\": \"set_light\", \"arguments\": \"{\\\"on\\\": true}\"}}]},"
                         " {\"role\": \"tool\", \"tool_call_id\": \"1\", \"content\": \"done\"}]";
    if (cactus_complete(model, second, answer, sizeof answer, "{\"max_tokens\": 8}", tools, NULL, NULL, NULL, 0) < 0)
        fail("second turn");
    puts(answer);

    /* Vectors, and a folder that keeps them. */
    const char *texts[2] = {"The Elbe flows into the North Sea.", "Bread is baked at 230 degrees."};
    const char *notes[2] = {"river", NULL};
    int ids[2] = {10, 20};
    size_t dim = 0;
    if (cactus_embed(model, texts[0], NULL, 0, &dim, true) != 0) fail("embed");
    float *vectors[2];
    for (int i = 0; i < 2; i++) {
        vectors[i] = malloc(dim * sizeof(float));
        if (!vectors[i] || cactus_embed(model, texts[i], vectors[i], dim * sizeof(float), NULL, true) != (int)dim) fail("embed");
    }
    float one;
    if (cactus_embed(model, texts[0], &one, sizeof one, &dim, true) != -2) return 1;
    void *index = cactus_index_init(argv[3], dim);
    if (!index) fail("index");
    if (cactus_index_init(argv[3], dim)) return 1;
    if (cactus_index_add(index, ids, texts, notes, (const float *const *)vectors, 2, dim) != 0) fail("add");
    if (cactus_index_add(index, ids, texts, NULL, (const float *const *)vectors, 2, dim) != -1) return 1;
    int found[4], *found_list[1] = {found};
    float scores[4], *score_list[1] = {scores};
    size_t found_size[1] = {4}, score_size[1] = {4};
    if (cactus_index_query(index, (const float *const *)vectors, 1, dim, "{\"top_k\": 2}", found_list, found_size, score_list, score_size) != 0)
        fail("query");
    printf("%zu found, first %d, cosine %.2f\n", found_size[0], found[0], scores[0]);
    char text[64], note[16], *text_list[1] = {text}, *note_list[1] = {note};
    size_t text_size[1] = {sizeof text}, note_size[1] = {sizeof note};
    if (cactus_index_get(index, ids, 1, text_list, text_size, note_list, note_size, NULL, NULL) != 0) fail("get");
    printf("%s (%s)\n", text, note);
    text_size[0] = 4;
    if (cactus_index_get(index, ids, 1, text_list, text_size, NULL, NULL, NULL, NULL) != -1) return 1;
    printf("%zu bytes are needed\n", text_size[0]);
    if (cactus_index_delete(index, ids, 1) != 0 || cactus_index_compact(index) != 0) fail("delete");
    if (cactus_index_get(index, ids, 1, NULL, NULL, NULL, NULL, NULL, NULL) != -1) return 1;
    puts(cactus_get_last_error());
    cactus_index_destroy(index);
    for (int i = 0; i < 2; i++) free(vectors[i]);
    cactus_destroy(model);

    /* Answers from the files of a folder. */
    model = cactus_init(argv[1], argv[2], true);
    if (!model) fail("corpus");
    if (cactus_rag_query(model, "Where does the Elbe flow?", answer, sizeof answer, 1) < 0) fail("passages");
    puts(answer);
    if (cactus_complete(model, "[{\"role\": \"user\", \"content\": \"Where does the Elbe flow?\"}]", answer, sizeof answer, "{\"max_tokens\": 8}",
                        NULL, NULL, NULL, NULL, 0) < 0)
        fail("answer");
    puts(answer);
    cactus_destroy(model);
    return 0;
}
