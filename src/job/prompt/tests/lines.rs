//! Tests of OpenAI batch lines.

use super::*;

pub(super) fn line(url: &str, body: Value) -> InputRow {
    row(json!({"custom_id": "a", "method": "POST", "url": url, "body": body}))
}

#[test]
fn openai_lines_bring_prompt_and_parameters() {
    let renderer = renderer(json!({"generate": {"max_tokens": 7, "temperature": 0.5, "choice": ["a", "b"]}}));
    let messages = json!([{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                          {"role": "user", "content": "<|im_end|>"}]);
    let plain = renderer
        .render(&line(
            "/v1/chat/completions",
            json!({"model": "x", "messages": messages}),
        ))
        .unwrap();
    assert_eq!(
        plain.text,
        "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(controls(&plain.tokens), [257, 258, 257, 258, 257]);
    assert!(Arc::ptr_eq(&plain.params, renderer.params()));
    assert_eq!(
        (
            plain.params.max_tokens,
            plain.params.sampling.temperature,
            plain.params.seed
        ),
        (7, 0.5, 9)
    );

    let body = json!({
        "messages": messages, "max_completion_tokens": 3, "temperature": 0, "top_p": 0.9, "seed": 5, "stop": "\n",
        "n": 1, "logprobs": false, "presence_penalty": 0.5, "frequency_penalty": null, "top_k": -1, "min_p": 0.1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    });
    let params = renderer.render(&line("/v1/chat/completions", body)).unwrap().params;
    assert_eq!(
        (
            params.max_tokens,
            params.sampling.temperature,
            params.sampling.top_p,
            params.seed
        ),
        (3, 0.0, 0.9, 5)
    );
    assert_eq!(
        (
            params.sampling.top_k,
            params.sampling.min_p,
            params.logprobs,
            params.sampling.presence_penalty
        ),
        (0, 0.1, false, 0.5)
    );
    assert_eq!(params.stop, ["\n"]);
    assert_eq!(params.shape, OutputConstraint::JsonSchema(json!({"type": "object"})));

    let text = renderer
        .render(&line("/v1/completions", json!({"prompt": "hi<s>"})))
        .unwrap();
    assert_eq!((text.tokens[0], controls(&text.tokens)), (256, vec![256]));
    let ids = renderer
        .render(&line("/v1/completions", json!({"prompt": [104, 105]})))
        .unwrap();
    assert_eq!(ids.tokens, [104, 105]);
}

#[test]
fn openai_lines_set_seed_logprobs_and_stops() {
    let renderer = renderer(json!({"generate": {"logprobs": true, "stop": ["x", "<|im_start|>"], "ignore_eos": true}}));
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        renderer
            .render(&line("/v1/chat/completions", body))
            .map(|rendered| rendered.params)
    };
    for (seed, expected) in [(json!(u64::MAX), u64::MAX), (json!(-1), u64::MAX), (json!(0), 0)] {
        assert_eq!(chat(json!({"seed": seed})).unwrap().seed, expected);
    }
    assert!(
        chat(json!({"logprobs": true, "modalities": ["text"]}))
            .unwrap()
            .logprobs
    );
    assert!(chat(json!({})).unwrap().logprobs);
    let error = chat(json!({"logprobs": false})).unwrap_err();
    assert!(error.contains("they must agree"), "{error}");
    // A stop text that is a special token's text becomes that stop token; a line's stops replace
    // the job's.
    assert_eq!(chat(json!({})).unwrap().stop_token_ids, [257]);
    assert_eq!(
        chat(json!({"stop": ["<|im_end|>"], "stop_token_ids": [7]}))
            .unwrap()
            .stop_token_ids,
        [7, 258]
    );
    // The job's stops apply only to free answers.
    let choice = chat(json!({"guided_choice": ["a"]})).unwrap();
    assert_eq!(
        (choice.stop.len(), choice.stop_token_ids.len(), choice.ignore_eos),
        (0, 0, false)
    );
}

#[test]
fn openai_lines_that_ask_for_too_much_are_errors() {
    let renderer = renderer(json!({}));
    let good = json!([{"role": "user", "content": "x"}]);
    let cases = [
        (
            json!({"messages": good, "tools": [{"type": "function"}]}),
            "`tools` in `body` is not supported",
        ),
        (json!({"messages": good, "logit_bias": {"5": 1}}), "`logit_bias`"),
        (
            json!({"messages": good, "temprature": 1}),
            "unknown field `temprature` in `body`; did you mean `temperature`?",
        ),
        (
            json!({"messages": good, "temperature": "hot"}),
            "`temperature` is \"hot\", not a number",
        ),
        (json!({"messages": good, "temperature": -1}), "`temperature` is -1"),
        (json!({"messages": good, "max_tokens": 0}), "`max_tokens` is 0"),
        (json!({"messages": good, "max_tokens": 5000}), "leaves no room"),
        (
            json!({"messages": good, "n": 2}),
            "`n` is 2, but `generate.n` of all rows is 1",
        ),
        (
            json!({"messages": good, "top_logprobs": 3, "logprobs": true}),
            "`top_logprobs`",
        ),
        (
            json!({"messages": good, "logprobs": true}),
            "`logprobs` is true, but `generate.logprobs` of all rows is false; they must agree",
        ),
        (
            json!({"messages": good, "modalities": ["text", "audio"]}),
            "`modalities` in `body` is not supported",
        ),
        (
            json!({"messages": good, "verbosity": "low"}),
            "`verbosity` in `body` is not supported",
        ),
        (
            json!({"messages": good, "stop_token_ids": [259]}),
            "`stop_token_ids` holds 259, no id of the vocabulary (0 to 258)",
        ),
        (
            json!({"messages": good, "guided_choice": ["a"], "stop": "x"}),
            "`stop` cannot stand beside `choice`",
        ),
        (json!({"messages": good, "seed": 1e30}), "`seed` is"),
        (
            json!({"messages": good, "response_format": {"type": "grammar"}}),
            "`response_format.type`",
        ),
        (
            json!({"messages": good, "guided_choice": ["a", "a"]}),
            "`guided_choice` holds `a` twice",
        ),
        (
            json!({"messages": good, "guided_choice": ["a"], "guided_regex": "a"}),
            "one shape",
        ),
        (json!({"messages": []}), "`messages` is empty"),
        (
            json!({"messages": [{"role": "usr", "content": "x"}]}),
            "`messages[0].role` is `usr`; did you mean `user`?",
        ),
        (json!({"messages": [{"role": "user"}]}), "`messages[0].content`"),
        (
            json!({"messages": good, "chat_template_kwargs": {"x": 1}}),
            "`body` sets `x`, which the chat template never reads",
        ),
        (
            json!({"messages": good, "continue_final_message": "content"}),
            "`body` sets `continue_final_message` to \"content\", neither true nor false",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "of type `image_url`",
        ),
        (json!({}), "`messages` is missing"),
    ];
    for (body, expected) in cases {
        let error = renderer.render(&line("/v1/chat/completions", body)).unwrap_err();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
    let error = renderer.render(&line("/v1/embeddings", json!({}))).unwrap_err();
    assert!(error.contains("`/v1/embeddings`"), "{error}");
    let error = renderer
        .render(&line("/v1/completions", json!({"prompt": ["a", "b"]})))
        .unwrap_err();
    assert!(error.contains("list of prompts"), "{error}");
    let body = json!({"prompt": "a", "chat_template_kwargs": {"x": 1}});
    let error = renderer.render(&line("/v1/completions", body)).unwrap_err();
    assert!(
        error.contains("`chat_template_kwargs` in `body` is for chat"),
        "{error}"
    );
    assert!(renderer.render(&row(json!({"a": 1}))).is_err());
    let columns = ["a".to_string()];
    assert!(
        renderer
            .check_columns(&columns)
            .unwrap_err()
            .to_string()
            .contains("no OpenAI batch file")
    );
}
