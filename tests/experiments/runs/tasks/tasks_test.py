"""What each task gives its model, what it measures, and which of the model's weights recipes find."""

from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runs import build, experiment, flops, recipes, warm_start
from experiments.runs.data.batches import Batches, DataConfig
from experiments.runs.tasks import decoding, images, known, language, translation
import sparse24_jax as s24
from sparse24_jax.rules import leaves_by_path
from tests.experiments.fakes import fake_data

TASKS = ('bert_nano', 'deit_nano', 'finetune_nano', 'translation_nano', 'llama_nano')


def parts_of(name, *overrides):
  config = experiment.load_config(name, overrides, tiny=True)
  return build.make_parts(config, data=fake_data(config))


class MaskedTest(parameterized.TestCase):
  def test_what_is_masked_and_how(self):
    rows = np.random.default_rng(0).integers(0, 50, (500, 41))
    batch = language.mask_tokens(rows, np.random.default_rng(1), vocab_size=50)
    hidden = batch['weights'] > 0
    np.testing.assert_array_equal(batch['targets'], rows[:, :-1])
    np.testing.assert_array_equal(hidden.sum(axis=1), np.full(500, 6))  # 15% of 40
    np.testing.assert_array_equal(batch['inputs'][~hidden], batch['targets'][~hidden])
    shown, true = batch['inputs'][hidden], batch['targets'][hidden]
    self.assertAlmostEqual(np.mean(shown == 50), 0.8, delta=0.03)
    # One in fifty of the tokens drawn is the true one.
    self.assertAlmostEqual(np.mean(shown == true), 0.1 + 0.1 / 50, delta=0.02)
    self.assertLess(abs(hidden.mean(axis=0) - 0.15).max(), 0.06)  # at every position

  def test_masks_of_validation_depend_on_the_text_alone(self):
    rows = np.arange(60).reshape(2, 30)
    first, again = (language.mask_tokens(rows, None, vocab_size=60)['inputs'] for _ in range(2))
    np.testing.assert_array_equal(first, again)

  def test_a_resumed_run_draws_what_the_other_would_have_drawn(self):
    rows = list(np.random.default_rng(0).integers(0, 50, (20, 17)))
    data = Batches(DataConfig(batch_size=4), {'train': rows, 'validation': rows}, lambda r, g: {'rows': r}, 'x')
    data = data.made(lambda r, g: language.mask_tokens(r, g, vocab_size=50))
    iterator, again = data.train(), data.train()
    for _ in range(7):
      next(iterator)
    again.set_state(iterator.get_state())
    expected = next(iterator)
    for name, found in next(again).items():
      np.testing.assert_array_equal(found, expected[name])

  def test_shares_of_processes_are_of_one_draw(self):
    rows = list(np.random.default_rng(0).integers(0, 50, (20, 17)))

    def first(**share):
      data = Batches(DataConfig(batch_size=4, **share), {'train': rows}, mask, 'x')
      return next(data.train())['inputs']

    def mask(batch, rng):
      return language.mask_tokens(batch, rng, vocab_size=50)

    halves = [first(process_index=i, process_count=2) for i in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), first())

  def test_loss_is_that_of_the_masked_tokens(self):
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 4, 5)), rng.integers(0, 5, (2, 4))
    weights = np.array([[1, 0, 0, 1], [0, 1, 0, 0]])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = [-log_p[i, j, targets[i, j]] for i, j in zip(*np.nonzero(weights), strict=True)]
    batch = {'targets': jnp.asarray(targets), 'weights': jnp.asarray(weights, jnp.float32)}
    found = language.masked_loss(jnp.asarray(logits, jnp.float32), batch)
    self.assertAlmostEqual(float(found), np.mean(picked), places=5)


class ImagesTest(absltest.TestCase):
  def test_moved_pictures_are_parts_of_wider_ones(self):
    pictures = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3), np.uint8)
    seen = set()
    for picture, moved in zip(pictures, images.move(pictures, np.random.default_rng(1)), strict=True):
      wide = np.pad(picture, ((1, 1), (1, 1), (0, 0)), mode='edge')
      found = [
        (y, x, flip)
        for y in range(3) for x in range(3) for flip in (1, -1)
        if np.array_equal(wide[y : y + 8, x : x + 8][:, ::flip], moved)
      ]  # fmt: skip
      self.assertLen(found, 1)
      seen.update(found)
    self.assertGreater(len(seen), 10)


class DecodingTest(absltest.TestCase):
  def test_greedy_follows_the_likeliest_and_ends(self):
    table = np.full((6, 6), -9.0)
    for token, following in ((0, 2), (2, 4), (4, 5), (5, 1)):
      table[token, following] = 0
    table[3, 3] = 0
    start = jnp.array([[0, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]])
    found = decoding.complete(lambda t: jnp.asarray(table)[t], start, 1, vocab_size=6, end=5)
    np.testing.assert_array_equal(found, [[0, 2, 4, 5, 5, 5], [3, 3, 3, 3, 3, 3]])
    np.testing.assert_array_equal(
      decoding.complete(lambda t: jnp.asarray(table)[t], start, 1, until=3, vocab_size=6)[0], [0, 2, 4, 0, 0, 0]
    )

  def test_draws_follow_the_temperature_and_the_likeliest(self):
    logits = jnp.tile(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), (4000, 1))
    drawn = decoding.pick(logits, jax.random.key(0))
    np.testing.assert_allclose(np.bincount(drawn) / 4000, [0.5, 0.3, 0.2], atol=0.03)
    drawn = decoding.pick(logits, jax.random.key(0), temperature=0.5, top_k=2)
    np.testing.assert_allclose(np.bincount(drawn) / 4000, np.array([0.25, 0.09]) / 0.34, atol=0.03)


class TranslationTest(absltest.TestCase):
  def test_bleu_of_a_model_that_copies_and_of_one_that_does_not(self):
    pytest.importorskip('sacrebleu')
    config = experiment.load_config('translation_nano', tiny=True)
    data = fake_data(config)
    # With words of one letter BLEU's four-grams need blanks between them.
    data.tokenizer.decode = lambda tokens: ' '.join(chr(65 + t) for t in tokens)

    def copies(source, lengths, target):
      here = jnp.arange(target.shape[1])[None] < lengths[:, None]
      right = jnp.where(here, source[:, : target.shape[1]], data.tokenizer.separator)
      return jax.nn.one_hot(right, data.vocab_size + 2)

    found = translation.bleu(copies, data, 2)
    self.assertEqual(found['exact'], 1.0)
    self.assertAlmostEqual(found['bleu'], 100.0, places=3)
    wrong = translation.bleu(lambda *inputs: jnp.roll(copies(*inputs), 1, axis=-1), data, 1)
    self.assertEqual(wrong['exact'], 0.0)
    self.assertLess(wrong['bleu'], 50.0)

  def test_the_target_is_given_one_token_late(self):
    rows = {'source': np.zeros((1, 4)), 'length': np.array([2]), 'target': np.array([[7, 8, 5, 9]])}
    batch = translation.teach(rows, None, vocab_size=9)
    self.assertEqual(batch['target_in'].tolist(), [[10, 7, 8, 5]])
    self.assertEqual(batch['weights'].tolist(), [[1, 1, 1, 0]])


class ModelTest(parameterized.TestCase):
  @parameterized.parameters(*TASKS)
  def test_recipes_find_the_linear_layers_of_every_model(self, name):
    parts = parts_of(name)
    family, config = build.family_of(parts.config), parts.model.config
    params = jax.eval_shape(lambda: parts.model.init(jax.random.key(0), *family.example(config)))['params']
    blocks = {path for path, _ in leaves_by_path(params) if path.endswith('kernel') and 'h_' in path}
    for pattern, expected in ((recipes.FFN, {p for p in blocks if '/mlp/' in p}), (recipes.LINEAR, blocks)):
      bound = s24.bind(s24.recipes.ste(pattern), lambda p, *x: parts.model.apply({'params': p}, *x), params,
                       *family.example(config))  # fmt: skip
      self.assertEqual({entry.path for entry in bound.weights}, expected)

  @pytest.mark.slow
  def test_padding_is_not_seen_and_neither_is_what_follows(self):
    parts = parts_of('translation_nano', 'model.num_layers=1')
    batch = parts.data.validation(1)[0]
    inputs = [jnp.asarray(batch[name][:2]) for name in parts.task.inputs]
    params = parts.model.init(jax.random.key(0), *inputs)
    source, lengths, target = inputs
    other = source.at[0, int(lengths[0]) :].set(1)
    later = target.at[:, 4:].set(3)
    apply = jax.jit(parts.model.apply)
    before, after = apply(params, source, lengths, target), apply(params, other, lengths, later)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    self.assertGreater(np.abs(before - after)[:, 4:].max(), 1e-3)
    seen = apply(params, source.at[:, 0].add(1), lengths, target)
    self.assertGreater(np.abs(before - seen)[:, 0].max(), 1e-5)

  def test_flops_of_a_masked_model_have_the_whole_square(self):
    config = experiment.load_config('bert_nano', tiny=True)
    dense = s24.recipes.dense()
    masked = flops.of_experiment(config, dense, vocab_size=256).sum()
    with config.unlocked():
      config.task = 'language_model'
    causal = flops.of_experiment(config, dense, vocab_size=256).sum()
    length = config.data.seq_len
    self.assertAlmostEqual(masked.attention / causal.attention, 2 * length / (length + 1))
    self.assertEqual(masked.linear, causal.linear)

  def test_a_task_that_is_not_counted_says_so(self):
    config = experiment.load_config('deit_nano', tiny=True)
    self.assertIsNone(flops.of_run(config.to_dict()))
    with self.assertRaisesRegex(ValueError, "language models; task 'image_classification' is none"):
      flops.of_experiment(config, s24.recipes.dense(), vocab_size=10)


class SettingsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('bert_nano', 'task=tagging', "task is 'tagging'; known: language_model, masked_lm"),
    ('bert_nano', 'model.family=vit', "model.family is 'vit'; task 'masked_lm' takes gpt2"),
    ('deit_nano', 'model.seq_len=20', 'images of 8 in patches of 2 .* take 17 positions'),
    ('translation_nano', 'model.tied=False', 'a translator takes tied=True'),
  )
  def test_bad_settings(self, name, override, message):
    with self.assertRaisesRegex(ValueError, message):
      parts_of(name, override)

  def test_a_checkpoint_says_its_task(self):
    found = [build.identity(parts_of(name)) for name in ('nano', 'bert_nano')]
    self.assertEqual([f['task'] for f in found], ['language_model', 'masked_lm'])
    self.assertEqual([f['model']['causal'] for f in found], [True, False])


class WarmStartTest(absltest.TestCase):
  def test_what_is_taken_and_what_is_new(self):
    parts = parts_of('finetune_nano', 'model.num_layers=1', 'model.positions=learnt')
    example = build.family_of(parts.config).example(parts.model.config)
    shapes = jax.eval_shape(lambda: parts.model.init(jax.random.key(0), *example)['params'])
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes)
    found = {path: np.full(leaf.shape, 7.0) for path, leaf in leaves_by_path(params) if 'classifier' not in path}
    found['wte/embedding'] = np.full((33, 32), 7.0)  # a token more, for a mask
    found['lm_head/kernel'] = np.zeros((32, 33))
    settings = warm_start.settings_of(parts)

    def merge(found, theirs=settings, **fields):
      return warm_start.merge(params, warm_start.Source(found, 1, theirs, **fields), settings)

    merged, new, left_out = merge(found)
    self.assertCountEqual(new, ['classifier/bias', 'classifier/kernel'])
    self.assertEqual(left_out, ['lm_head/kernel'])
    for path, leaf in leaves_by_path(merged):
      if path not in new:
        self.assertTrue(np.all(leaf == 7), path)
    with self.assertRaisesRegex(ValueError, r'h_0/mlp/c_fc/kernel has shape \(2, 2\) in the run of init_from'):
      merge({'h_0/mlp/c_fc/kernel': np.zeros((2, 2))})
    with self.assertRaisesRegex(ValueError, r"no parameter of this model .*'other'"):
      merge({'other': np.zeros(1)})
    with self.assertRaisesRegex(ValueError, 'wte/embedding has 70 rows .* and 32 in .* another vocabulary'):
      merge({**found, 'wte/embedding': np.zeros((70, 32))})
    merge({**found, 'wte/embedding': np.zeros((64, 32))}, spare_rows=64)  # filled up to a multiple
    merge({**found, 'wpe/embedding': np.zeros((99, 32))})
    with self.assertRaisesRegex(ValueError, 'h_1/mlp/c_fc/kernel is in .* not in this model, .* model.num_layers'):
      merge({**found, 'h_1/mlp/c_fc/kernel': np.zeros((32, 96))})
    self.assertEqual(settings, {
      'data.tokenizer': 'bytes', 'model.num_heads': 2, 'model.mlp': 'geglu', 'model.positions': 'learnt',
      'model.scale_embeddings': False,
    })  # fmt: skip
    others = {'data.tokenizer': 'gpt2', 'model.num_heads': 4, 'model.mlp': 'swiglu', 'model.positions': 'rotary'}
    for name, other in others.items():
      with self.assertRaisesRegex(ValueError, rf'^{name} is {other!r} in the run of init_from, and {settings[name]!r}'):
        merge(found, {**settings, name: other})
    merge(found, {'data.tokenizer': 'bytes', 'model.rope_theta': 1e4})  # what one of them does not have


class RegistryTest(absltest.TestCase):
  def test_every_family_of_a_task_is_there(self):
    for task in known.TASKS.values():
      self.assertContainsSubset(task.families, build.FAMILIES)

  def test_the_language_model_asks_the_pipeline(self):
    with mock.patch('experiments.runs.data.pipeline.load') as load:
      language.NEXT_TOKEN.load(corpus='stdlib')
    load.assert_called_once_with(corpus='stdlib')


if __name__ == '__main__':
  absltest.main()
