// Result of sample.cu for each row of logits, from which embed.cu takes the next tokens.
#pragma once
#include "types.cuh"

struct Drawn {
    u32 token, status;
    // The token's raw logit, the largest of all raw logits, and the sum of exp(raw logit -
    // largest).
    float logit, largest, total;
};

// Marks a token that is not an id, but the index of the row whose drawn token it is.
#define IS_DRAWN 0x80000000u
