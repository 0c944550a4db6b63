"""Real models over the daemon: how far the next token's probabilities move, and what is written.

Each reads 500 tokens and then 200 more one by one, whatever it would have said itself; all of its
own arithmetic is float32, so that what is measured comes from where K and V are.
"""

import gc
import unittest

from hf_case import Case, ROOT, hf, torch
from real_models import load_model, text_of

PROMPT, STEPS, NEW = 500, 200, 64
KL_MAX = {"bf16": 1e-4, "fp8": 6e-3}  # mean over the steps, against float32 attention
MARGIN_MIN = 0.05  # between the best two logits; below it rounding may choose


def hidden_states(model, argument, cache, ids):
    """Of the last STEPS tokens, [STEPS, hidden]; the prompt goes in whole, they one by one."""
    named = {argument: cache, "use_cache": True}
    with torch.no_grad():
        model.model(ids[:, :PROMPT], **named)
        states = [model.model(ids[:, at:at + 1], **named).last_hidden_state[0]
                  for at in range(PROMPT, PROMPT + STEPS)]
    return torch.cat(states)


def log_probabilities(model, states):
    with torch.no_grad():
        return torch.log_softmax(model.lm_head(states).double(), dim=1)


class Real(Case):
    @classmethod
    def models(cls, folder):
        text = (ROOT / "deploy/example.textproto").read_text()
        return text[text.index("models {"):]

    def teacher_forced(self, model, name, precision):
        with hf.attach(model, self.client, f"{name}_{precision}") as attached, \
                attached.cache() as cache:
            states = hidden_states(model, attached.cache_argument, cache, self.ids)
            self.assertEqual(cache.sequences[0].stat().seq_lens,
                             (PROMPT + STEPS,) * model.config.num_hidden_layers)
        return log_probabilities(model, states)

    def check(self, name):
        model, text = load_model(name), text_of(name)
        self.ids = text[:, :PROMPT + STEPS]
        targets = text[0, PROMPT + 1:PROMPT + STEPS + 1]
        with torch.no_grad():
            whole = model.model(self.ids).last_hidden_state[0, PROMPT:]
        want = log_probabilities(model, whole)

        def perplexity(logs):
            return float(torch.exp(-logs.gather(1, targets[:, None]).mean()))
        print(f"{name}: perplexity {perplexity(want):.3f} by eager attention")
        for precision, kl_max in KL_MAX.items():
            got = self.teacher_forced(model, name, precision)
            kl = (want.exp() * (want - got)).sum(dim=1)
            print(f"{name} {precision}: KL {float(kl.mean()):.2e}, largest {float(kl.max()):.2e}, "
                  f"perplexity {perplexity(got):.3f}", flush=True)
            with self.subTest(precision):
                self.assertLessEqual(float(kl.mean()), kl_max)
                self.assertGreater(float(kl.mean()), 1e-12, "the daemon was not asked")
        self.check_text(model, name)

    def check_text(self, model, name):
        """Greedy text is the same up to the first step that rounding may decide."""
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        prompt = self.ids[:, :200]
        with hf.attach(model, self.client, f"{name}_bf16"):
            got = model.generate(prompt, **options)[0, prompt.shape[1]:].tolist()
        local = model.generate(prompt, output_logits=True, return_dict_in_generate=True, **options)
        want = local.sequences[0, prompt.shape[1]:].tolist()
        best = torch.cat(local.logits).topk(2).values
        close = ((best[:, 0] - best[:, 1]) < MARGIN_MIN).nonzero()
        sure = int(close[0]) if len(close) else NEW
        same = next((at for at in range(NEW) if got[at] != want[at]), NEW)
        print(f"{name}: {same} of {NEW} greedy tokens the same; the first close step is {sure}")
        self.assertGreaterEqual(same, sure)

    def test_smollm2_135m(self):
        self.check("smollm2_135m")

    def test_gemma3_270m(self):
        self.check("gemma3_270m")

    def tearDown(self):
        gc.collect()
        super().tearDown()


if __name__ == "__main__":
    unittest.main()
