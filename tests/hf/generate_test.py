"""generate() of small random models gives the tokens that their own attention code gives."""

import copy
import unittest

from hf_case import CONFIGS, Case, hf, random_model, tokens_of, torch, transformers

PAGE_TOKENS = 64
NEW = 24


def padded(*lengths, seed=0):
    """Prompts of these lengths, padded on the left."""
    ids = tokens_of(len(lengths), max(lengths), seed=seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :max(lengths) - length] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


class Generate(Case):
    def both(self, name, inputs, seed=0, **options):
        """Tokens by the daemon and by the model itself, in this order."""
        model = random_model(name)
        options = {"max_new_tokens": NEW, "do_sample": False, **options}
        with hf.attach(model, self.client, f"{name}_bf16"):
            torch.manual_seed(seed)
            got = model.generate(**inputs, **options)
        self.assertNotIn("generate", vars(model))
        torch.manual_seed(seed)
        return got.tolist(), model.generate(**inputs, **options).tolist()

    def test_greedy_of_a_padded_batch(self):
        for name in CONFIGS:
            with self.subTest(name):
                got, want = self.both(name, padded(40, 7, 1, 23))
                self.assertEqual(got, want)

    def test_sampling(self):
        got, want = self.both("llama", padded(9, 5), do_sample=True, temperature=1.5, top_k=50,
                              num_return_sequences=2)
        self.assertEqual(got, want)

    def test_beam_search_of_a_padded_batch(self):
        for name in ("llama", "gemma2"):
            with self.subTest(name):
                got, want = self.both(name, padded(40, 7), num_beams=4, num_return_sequences=2)
                self.assertEqual(got, want)

    def test_beam_sampling(self):
        got, want = self.both("qwen3", padded(12), num_beams=3, do_sample=True)
        self.assertEqual(got, want)

    def test_assisted_by_a_model_of_its_own(self):
        """Another model's guesses are mostly wrong, its own mostly right: both crop."""
        for seed in (0, 1):
            for name in ("llama", "mistral"):
                with self.subTest(name, seed=seed):
                    assistant = random_model(name, seed=seed)
                    got, want = self.both(name, padded(30), assistant_model=assistant)
                    self.assertEqual(got, want)

    def test_assisted_by_looking_up_the_prompt(self):
        ids = tokens_of(1, 12).repeat(1, 3)  # that what follows has been seen
        got, want = self.both("llama", {"input_ids": ids}, prompt_lookup_num_tokens=6)
        self.assertEqual(got, want)

    def test_a_conversation_goes_on_in_its_cache(self):
        self.converse("llama", 15)

    def test_a_second_question_may_be_much_longer_than_a_window(self):
        """And than layers of a window may run apart."""
        self.converse("gemma2", 200)

    def converse(self, name, tokens):
        model = random_model(name)
        first, more = padded(20)["input_ids"], tokens_of(1, tokens, seed=5)

        def ask_twice(argument, cache):
            options = {argument: cache, "max_new_tokens": 8, "do_sample": False}
            answered = model.generate(first, **options)
            return model.generate(torch.cat([answered, more], dim=1), **options).tolist()
        with hf.attach(model, self.client, f"{name}_bf16") as attached, attached.cache() as cache:
            got = ask_twice(attached.cache_argument, cache)
            self.assertEqual(len(cache.sequences), 1)
        cache = transformers.DynamicCache(config=model.config)
        self.assertEqual(got, ask_twice(hf.cache_argument(model), cache))

    def test_a_returned_cache_is_the_callers(self):
        model = random_model("llama")
        with hf.attach(model, self.client, "llama_bf16") as attached:
            result = model.generate(tokens_of(1, 9), max_new_tokens=4, do_sample=False,
                                    return_dict_in_generate=True)
            with getattr(result, attached.cache_argument) as cache:
                self.assertEqual(cache.get_seq_length(), cache.sequences[0].stat().seq_lens[0])


class Pages(transformers.LogitsProcessor):
    """Asks in every step what pages the rows of a cache have."""

    def __init__(self, client, cache):
        self._client, self._cache, self.steps = client, cache, []

    def __call__(self, input_ids, scores):
        infos = self._client.stat_sequences(self._cache.sequences)
        pool = self._client.server_info().model("llama_bf16").groups[0]
        self.steps.append((infos, pool.pages_used))
        return scores


class Sharing(Case):
    names = ("llama",)

    def test_beams_share_their_prompt(self):
        model = random_model("llama")
        with hf.attach(model, self.client, "llama_bf16") as attached, attached.cache() as cache:
            pages = Pages(self.client, cache)
            model.generate(tokens_of(1, 3 * PAGE_TOKENS + 5), max_new_tokens=10, num_beams=4,
                           do_sample=False, logits_processor=[pages],
                           **{attached.cache_argument: cache})
        for infos, pages_used in pages.steps[2:]:
            self.assertEqual([info.pages for info in infos], [4] * 4)
            self.assertTrue(all(info.pages_shared >= 3 for info in infos), infos)
            # Three of the prompt, which all name, and at most the last of each beam.
            self.assertLessEqual(pages_used, 3 + 4)

    def test_a_copy_shares_the_prefix_and_both_go_on(self):
        model, prefix = random_model("llama"), tokens_of(1, 2 * PAGE_TOKENS + 3)
        questions = [torch.cat([prefix, tokens_of(1, 9, seed=seed)], dim=1) for seed in (1, 2)]
        options = {"max_new_tokens": 6, "do_sample": False}
        with hf.attach(model, self.client, "llama_bf16") as attached, \
                attached.cache() as cache, torch.no_grad():
            model(prefix, **{attached.cache_argument: cache})
            got = []
            for question in questions:
                with copy.deepcopy(cache) as mine:
                    info = mine.sequences[0].stat()
                    self.assertEqual((info.pages, info.pages_shared), (3, 3))
                    got.append(model.generate(question, **options,
                                              **{attached.cache_argument: mine}).tolist())
            self.assertEqual(cache.sequences[0].stat().seq_lens, (2 * PAGE_TOKENS + 3,) * 4)
        self.assertEqual(got, [model.generate(question, **options).tolist()
                               for question in questions])

    def test_rows_are_selected_and_repeated(self):
        model, ids = random_model("llama"), tokens_of(3, 10)
        with hf.attach(model, self.client, "llama_bf16") as attached, \
                attached.cache() as cache, torch.no_grad():
            named = {attached.cache_argument: cache, "use_cache": True}
            model(ids[:, :9], **named)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            rows = [2, 2, 0, 0]
            got = model(ids[rows, 9:], **named).logits
            want = model(ids[rows], use_cache=False).logits[:, 9:]
        self.assertLess(float((got - want).norm() / want.norm()), 0.1)


if __name__ == "__main__":
    unittest.main()
