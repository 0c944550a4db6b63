"""Small random models token by token: the logits are those of their own attention code."""

import unittest

from hf_case import CONFIGS, Case, hf, random_model, tokens_of, torch, transformers

import fp8kvd

PROMPT, STEPS = 40, 32
# Relative L2 of a step's logits. Both sides round Q, K and V, but sums in another order put some
# elements on the other side of a rounding. A key too many or too few costs 0.2 and more.
ROUNDED_ERROR_MAX = 1e-2
# The same against attention that rounds nothing: bf16 is off by up to 2^-9 an element, of which
# these weights, made to attend sharply, make 0.005 to 0.11.
EAGER_ERROR_MAX = 0.2


def error(got, want):
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def forward(model, argument, cache, ids, mask=None, prompt=PROMPT):
    """Logits [batch, tokens, vocabulary] of a prompt and then one token at a time."""
    logits, at = [], 0
    while at < ids.shape[1]:
        end = at + 1 if at else prompt
        named = {argument: cache, "use_cache": True}
        if mask is not None:
            named["attention_mask"] = mask[:, :end]
            named["position_ids"] = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, at:]
        with torch.no_grad():
            logits.append(model(ids[:, at:end], **named).logits)
        at = end
    return torch.cat(logits, dim=1)


class Forward(Case):
    def remote(self, model, name, *arguments, **named):
        with hf.attach(model, self.client, f"{name}_bf16") as attached, attached.cache() as cache:
            return forward(model, attached.cache_argument, cache, *arguments, **named)

    def local(self, model, implementation, *arguments, **named):
        model.set_attn_implementation(implementation)
        argument = hf.cache_argument(model)
        return forward(model, argument, transformers.DynamicCache(config=model.config),
                       *arguments, **named)

    def test_every_architecture_in_batches_of_1_and_4(self):
        for name in CONFIGS:
            for batch in (1, 4):
                with self.subTest(name, batch=batch):
                    model, ids = random_model(name), tokens_of(batch, PROMPT + STEPS)
                    got = self.remote(model, name, ids)
                    errors = [error(got, self.local(model, implementation, ids))
                              for implementation in ("rounded", "eager")]
                    print(f"{name} x {batch}: {errors[0]:.1e} of rounded, {errors[1]:.1e} of eager")
                    self.assertLess(errors[0], ROUNDED_ERROR_MAX)
                    self.assertLess(errors[1], EAGER_ERROR_MAX)

    def test_padding_left_and_between(self):
        """Left of a prompt, as generate() pads, and in the middle of what is added later."""
        ids = tokens_of(3, PROMPT + 8)
        mask = torch.ones_like(ids)
        mask[1, :PROMPT - 3], mask[2, :7], mask[0, PROMPT + 2] = 0, 0, 0
        for name in CONFIGS:
            with self.subTest(name):
                if "sliding_window" in CONFIGS[name][1]:
                    mask[0, PROMPT + 2] = 1  # the windows of transformers count padding, too
                model = random_model(name)
                got, want = (x[mask.bool()] for x in (
                    self.remote(model, name, ids, mask),
                    self.local(model, "rounded", ids, mask)))
                self.assertLess(error(got, want), ROUNDED_ERROR_MAX)

    def test_a_row_that_is_padding_alone_and_a_prompt_of_one_token(self):
        model, ids = random_model("llama"), tokens_of(2, 6)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0  # the prompt of row 1
        for prompt in (2, 1):
            got = self.remote(model, "llama", ids, mask, prompt=prompt)[mask.bool()]
            want = self.local(model, "rounded", ids, mask, prompt=prompt)[mask.bool()]
            self.assertLess(error(got, want), ROUNDED_ERROR_MAX)

    def test_a_second_prompt_is_attended_to_by_the_daemon(self):
        """Longer than a call takes of a row at once, and than a window."""
        ids = tokens_of(2, PROMPT + 100)
        for name in ("llama", "gemma2"):
            with self.subTest(name):
                model = random_model(name)
                with hf.attach(model, self.client, f"{name}_bf16") as attached, \
                        attached.cache() as cache, torch.no_grad():
                    named = {attached.cache_argument: cache, "use_cache": True}
                    got = [model(part, **named).logits for part in ids.split([PROMPT, 100], 1)]
                model.set_attn_implementation("rounded")
                named[hf.cache_argument(model)] = transformers.DynamicCache(config=model.config)
                with torch.no_grad():
                    want = [model(part, **named).logits for part in ids.split([PROMPT, 100], 1)]
                self.assertLess(error(got[1], want[1]), ROUNDED_ERROR_MAX)

    def test_a_prompt_much_longer_than_a_window(self):
        ids = tokens_of(1, 230)
        model = random_model("mistral")
        got = self.remote(model, "mistral", ids, prompt=220)
        self.assertLess(error(got, self.local(model, "rounded", ids, prompt=220)),
                        ROUNDED_ERROR_MAX)

    def test_without_a_cache_the_model_is_its_own(self):
        for name in ("llama", "gemma2", "gpt_oss"):
            model, ids = random_model(name), tokens_of(2, 20)
            model.set_attn_implementation("eager")
            with torch.no_grad():
                want = model(ids, use_cache=False).logits
                with hf.attach(model, self.client, f"{name}_bf16"):
                    got = model(ids, use_cache=False).logits
            self.assertLess(error(got, want), 1e-4)


class Refusals(Case):
    def test_another_models_layers(self):
        self.check("llama", "num_hidden_layers", 3, "has 3 layers.*llama_bf16 has 4")

    def test_another_window(self):
        self.check("mistral", "sliding_window", 32, "layer 0: window is 32 here and 24")

    def test_another_softcap(self):
        self.check("gemma2", "attn_logit_softcapping", 6.0, "layer 0: softcap is 6.0 here and 5.0")

    def test_another_scale(self):
        self.check("gemma2", "query_pre_attn_scalar", 64, "layer 0: sm_scale is 0.125 here and")

    def check(self, name, key, value, message):
        model = random_model(name, **{key: value})
        with self.assertRaisesRegex(ValueError, message), \
                hf.attach(model, self.client, f"{name}_bf16") as attached, \
                attached.cache() as cache, torch.no_grad():
            model(tokens_of(1, 4), **{attached.cache_argument: cache})

    def test_a_mask_of_four_dimensions(self):
        model = random_model("llama")
        with hf.attach(model, self.client, "llama_bf16") as attached, \
                attached.cache() as cache, torch.no_grad():
            named = {attached.cache_argument: cache}
            model(tokens_of(1, 4), **named)
            with self.assertRaisesRegex(ValueError, "attends causally"):
                model(tokens_of(1, 1), attention_mask=torch.zeros(1, 1, 1, 5), **named)

    def test_another_batch(self):
        model = random_model("llama")
        with hf.attach(model, self.client, "llama_bf16") as attached, \
                attached.cache() as cache, torch.no_grad():
            named = {attached.cache_argument: cache}
            model(tokens_of(2, 4), **named)
            with self.assertRaisesRegex(ValueError, "a batch of 3 for a cache of 2 rows"):
                model(tokens_of(3, 1), **named)

    def test_a_dropped_cache_is_not_renewed_any_more(self):
        with fp8kvd.Client(self.daemon.address) as client:
            model = random_model("llama")
            with hf.attach(model, client, "llama_bf16", ttl_s=0.3) as attached, torch.no_grad():
                cache = attached.cache()
                model(tokens_of(1, 4), **{attached.cache_argument: cache})
                self.assertEqual(len(client.list_sequences()), 1)
                del cache
                self.until(lambda: not client.list_sequences())


if __name__ == "__main__":
    unittest.main()
