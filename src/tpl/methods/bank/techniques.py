"""Training-time techniques of OOD detection: how a task's network learns to detect other tasks' images.

A technique overrides parts of `Technique`, plain cross-entropy. To add one, write a class here and add it to
`TECHNIQUES`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED, masked_mean
from tpl.methods.bank.bank import Technique


class LogitNorm(Technique):
    """Cross-entropy over logits of length 1 / temperature, so that confidence does not grow with their length."""

    name = "logitnorm"
    summary = "cross-entropy over logits of one length"
    paper = "Wei et al., Mitigating Neural Network Overconfidence with Logit Normalization, ICML 2022"

    temperature = 0.04
    epsilon = 1e-7  # added to a length before it divides

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """temperature * CE(f / (||f|| + epsilon) / temperature).

        The factor in front, which the paper leaves to the learning rate, keeps the gradient as large as that of plain
        cross-entropy: at 1 / temperature = 25 times its size, a rate chosen for that would not train at all.
        """
        logits = F.linear(z, weight, bias)
        length = torch.linalg.vector_norm(logits, dim=1, keepdim=True) + self.epsilon
        return self.temperature * F.cross_entropy(logits / length / self.temperature, labels, ignore_index=IGNORED)


class MCDropout(Technique):
    """Dropout on the features in training and at inference, where the same few masks serve every image."""

    name = "mcdropout"
    summary = "dropout on the features, also when answering: the mean of five passes"
    paper = (
        "Gal and Ghahramani, Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning, "
        "ICML 2016"
    )
    splits = False

    dropped = 0.5  # share of features that is dropped
    passes = 5
    seed = 5  # of the masks at inference

    @property
    def numbers(self) -> int:
        """One for every feature of every image."""
        return self.batch * self.dim

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy of the features that are not dropped."""
        kept = draws[: z.numel()].view_as(z) >= self.dropped
        return super().loss(z * kept / (1 - self.dropped), weight, bias, labels, draws)

    @classmethod
    def logits(cls, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The logarithm of the mean softmax over the passes."""
        masks = cls.masks(z.shape[1]).to(z.device)
        heads = (masks.unsqueeze(1) * weight.double()).flatten(0, 1)  # masking the head is the same as masking z
        passes = F.linear(z.double(), heads, bias.double().repeat(cls.passes)).view(len(z), cls.passes, len(weight))
        return passes.log_softmax(dim=2).logsumexp(dim=1) - math.log(cls.passes)

    @classmethod
    def masks(cls, dim: int) -> Tensor:
        """The masks `[passes, dim]` of inference, float64: 0, or 1 / (share of features kept)."""
        draws = torch.rand(cls.passes, dim, generator=torch.Generator().manual_seed(cls.seed))
        return (draws >= cls.dropped).double() / (1 - cls.dropped)


# Mixtures of images and labels


class Mixup(Technique):
    """Weighted means of two images of the batch and of their labels; one weight a step."""

    name = "mixup"
    summary = "weighted means of two images and of their labels"
    paper = "Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018"
    splits = False

    alpha = 0.2  # a step's weight is drawn from Beta(alpha, alpha)
    table_size = 4096  # quantiles of that distribution in a table: its inverse has no closed form

    def __init__(self, own: int, dim: int, batch: int, device: torch.device) -> None:
        super().__init__(own, dim, batch, device)
        from scipy.special import betaincinv  # as slow to import as all methods together

        table = betaincinv(self.alpha, self.alpha, (np.arange(self.table_size) + 0.5) / self.table_size)
        self.quantiles = torch.from_numpy(table).to(device, torch.float32)

    @property
    def numbers(self) -> int:
        """The weight, and the order in which images become partners."""
        return 1 + self.batch

    def weight_of(self, draws: Tensor) -> Tensor:
        """The weight `[1]` of an image against its partner's."""
        return self.quantiles[(draws[:1] * self.table_size).long()]

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """lambda x + (1 - lambda) x'."""
        others = images[partners(labels, draws[1:])]
        return torch.lerp(others.float(), images.float(), self.weight_of(draws)).to(images.dtype)

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy to the mixed labels."""
        logits, others = F.linear(z, weight, bias), labels[partners(labels, draws[1:])]
        return mixed_entropy(logits, labels, others, self.weight_of(draws))


class BoxTechnique(Technique):
    """A technique that pastes one box a step: `draws` begin with its share of the image and its centre."""

    size = (0, 0)  # of the images that were mixed last: `loss` is not shown them

    def share(self, draw: Tensor) -> Tensor:
        """The share `[1]` of the image that the box covers, from a uniform draw."""
        return draw

    def box(self, draws: Tensor) -> Tensor:
        """Where a step's images show another one, `[h, w]`."""
        return box(self.size, self.share(draws[:1]), draws[1:3])


class CutMix(BoxTechnique):
    """A box of another image is pasted into each; labels are mixed by area. Its share is drawn from Beta(1, 1)."""

    name = "cutmix"
    summary = "a box of another image pasted in, labels mixed by area"
    paper = (
        "Yun et al., CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features, ICCV 2019"
    )
    splits = False

    @property
    def numbers(self) -> int:
        """The box's share and centre, and the order in which images become partners."""
        return 3 + self.batch

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Every image with the box of its partner."""
        self.size = (images.shape[2], images.shape[3])
        return torch.where(self.box(draws), images[partners(labels, draws[3:])], images)

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy to the labels, mixed by the area that was pasted."""
        logits, others = F.linear(z, weight, bias), labels[partners(labels, draws[3:])]
        return mixed_entropy(logits, labels, others, 1 - self.box(draws).float().mean())


# Outliers: stored images of earlier tasks, or made-up ones


class OE(Technique):
    """Cross-entropy on the new images, cross-entropy to the uniform distribution on images of earlier tasks."""

    name = "oe"
    summary = "images of earlier tasks are to get the uniform distribution"
    paper = "Hendrycks et al., Deep Anomaly Detection with Outlier Exposure, ICLR 2019"
    outliers = True
    swaps_quarters = True

    outlier_weight = 0.5

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """CE on the new images + weight * (logsumexp f - mean f) on the outliers, if there are any."""
        logits, outlying = F.linear(z, weight, bias), labels == self.own
        entropy = F.cross_entropy(logits, torch.where(outlying, IGNORED, labels), ignore_index=IGNORED)
        return entropy + self.outlier_weight * masked_mean(to_uniform(logits), outlying)


class MixOE(BoxTechnique):
    """New images, and copies of them with a box of an outlier, labelled by a mixture with the uniform distribution.

    The copy of new image i takes the row of the i-th outlier in the batch.
    """

    name = "mixoe"
    summary = "images of earlier tasks pasted into new ones, labels mixed with the uniform distribution"
    paper = (
        "Zhang et al., Mixture Outlier Exposure: Towards Out-of-Distribution Detection in Fine-grained Environments, "
        "WACV 2023"
    )
    outliers = True

    alpha = 0.1  # the share that a new image keeps is drawn from Beta(alpha, 1), whose quantiles are u^(1 / alpha)
    mixture_weight = 1.0

    @property
    def numbers(self) -> int:
        """The box's share and centre."""
        return 3

    def share(self, draw: Tensor) -> Tensor:
        """1 minus what the new image keeps."""
        return 1 - draw ** (1 / self.alpha)

    def mixed(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """New images as they are, outliers only in a box within a new image."""
        self.size = (images.shape[2], images.shape[3])
        shown = self.box(draws) | ~self._mixture(labels)[:, None, None, None]
        return torch.where(shown, images, images.roll(len(labels) // 2, 0))

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """CE on the new images + weight * CE to lambda * one-hot + (1 - lambda) / C on the mixtures."""
        logits, mixture = F.linear(z, weight, bias), self._mixture(labels)
        targets = torch.where(mixture, labels.roll(len(labels) // 2), labels)
        new = (labels != IGNORED) & (labels != self.own)
        entropies = F.cross_entropy(
            logits, torch.where(new | mixture, targets, IGNORED), ignore_index=IGNORED, reduction="none"
        )
        pasted = self.box(draws).float().mean()
        mixed = torch.lerp(entropies, to_uniform(logits), pasted)
        return masked_mean(entropies, new) + self.mixture_weight * masked_mean(mixed, mixture)

    def _mixture(self, labels: Tensor) -> Tensor:
        """Rows of outliers whose new image, half a batch before them, counts: there are none in the first task."""
        partner = labels.roll(len(labels) // 2)
        return (labels == self.own) & (partner != IGNORED) & (partner != self.own)


class VOS(Technique):
    """Cross-entropy, and a logistic regression of real against virtual features on their energy.

    A virtual outlier is an unlikely point of a class's Gaussian in feature space. The least likely of many points is
    the one with the greatest Mahalanobis norm. Direction and norm of a point are independent, so it is any point,
    stretched: from a norm that is sqrt(dim), give or take 0.7, to the median of the greatest of `samples` norms, each
    chi-distributed. No point but the outlier itself is drawn.

    Points of the shared covariance need no factor of it: with n kept features z_i of classes y_i, the vector
    `sum_i e_i (z_i - mu_{y_i}) / sqrt(n) + sqrt(ridge) e'` has covariance `S + ridge * I` for standard normal e, e'.
    """

    name = "vos"
    summary = "unlikely points of the classes' Gaussians as virtual outliers"
    paper = "Du et al., VOS: Learning What You Don't Know by Virtual Outlier Synthesis, ICLR 2022"
    splits = False

    queue_size = 200  # latest features kept of every class; nothing is synthesised before all are there
    samples = 10_000  # points of a class, the least likely of which is its virtual outlier
    ridge = 1e-4  # added to the covariance's diagonal
    uncertainty_weight = 0.1
    certain = 1 - 1e-6  # erfinv is infinite at 1

    def __init__(self, own: int, dim: int, batch: int, device: torch.device) -> None:
        super().__init__(own, dim, batch, device)
        kept = own * self.queue_size
        self.queue = torch.zeros(kept + 1, dim, device=device)  # the last row takes what is not to be kept
        self.counts = torch.zeros(own, dtype=torch.long, device=device)
        self.classes = torch.arange(own, device=device)
        # One set of normal numbers serves all classes, each of which takes them shifted by one queue length.
        shifted = self.classes.unsqueeze(1) * self.queue_size + torch.arange(self.numbers, device=device)
        self.shifted = shifted % self.numbers
        from scipy.special import gammainccinv

        self.stretch = math.sqrt(2 * gammainccinv(dim / 2, math.log(2) / self.samples) / dim)
        self.scale = torch.ones((), device=device, requires_grad=True)
        self.offset = torch.zeros((), device=device, requires_grad=True)

    @property
    def numbers(self) -> int:
        """One for every feature vector that is kept and one for every dimension."""
        return self.own * self.queue_size + self.dim

    def parameters(self) -> list[Tensor]:
        """The logistic regression's slope and offset."""
        return [self.scale, self.offset]

    def loss(self, z: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy + weight * uncertainty loss, once every class's queue is full."""
        self.keep(z.detach(), labels)
        logits, virtual = F.linear(z, weight, bias), F.linear(self.virtual(draws), weight, bias)
        uncertainty = masked_mean(F.softplus(-self._real(logits)), labels != IGNORED)
        uncertainty = uncertainty + F.softplus(self._real(virtual)).mean()
        full = (self.counts >= self.queue_size).all()
        entropy = F.cross_entropy(logits, labels, ignore_index=IGNORED)
        return entropy + self.uncertainty_weight * full * uncertainty

    def _real(self, logits: Tensor) -> Tensor:
        """The log-odds of being real, from the energy -logsumexp f."""
        return self.scale * logits.logsumexp(dim=1) + self.offset

    @torch.no_grad()
    def keep(self, z: Tensor, labels: Tensor) -> None:
        """Write features over the oldest ones of their classes."""
        member = labels.unsqueeze(1) == self.classes
        count = member.long().cumsum(dim=0)
        label = labels.clamp_min(0)
        rank = (count * member).sum(dim=1) - 1  # among the batch's rows of its class
        place = label * self.queue_size + (self.counts[label] + rank) % self.queue_size
        latest = rank >= count[-1][label] - self.queue_size  # no place is written twice
        last = len(self.queue) - 1
        self.queue.index_copy_(0, torch.where((labels != IGNORED) & latest, place, last), z)
        self.counts += count[-1]

    @torch.no_grad()
    def virtual(self, draws: Tensor) -> Tensor:
        """One virtual outlier of every class, `[own, dim]`."""
        features = self.queue[:-1].view(self.own, self.queue_size, self.dim)
        means = features.mean(dim=1)
        deviations = (features - means.unsqueeze(1)).flatten(0, 1)
        uniform = (2 * draws - 1).clamp(-self.certain, self.certain)
        normal = (math.sqrt(2) * torch.erfinv(uniform))[self.shifted]
        spread = normal[:, : -self.dim] @ deviations / math.sqrt(len(deviations))
        return means + self.stretch * (spread + math.sqrt(self.ridge) * normal[:, -self.dim :])


class CMG(Technique):
    """Plain training, then fine-tuning of the head alone by energy (CMG-e), all in feature space.

    A generator conditioned on mixed classes makes the pseudo-outliers that the head is fine-tuned against.
    """

    name = "cmg"
    summary = "head fine-tuned against features that a VAE makes for mixed classes"
    paper = "Wang et al., CMG: A Class-Mixed Generation Approach to Out-of-Distribution Detection, ECML PKDD 2022"

    epochs, batch_size, lr = 15, 64, 1e-4  # of the fine-tuning
    outliers_a_step = 128
    outliers_for_margin = 1024
    margin_in, margin_out = 0.2, 0.8  # quantiles of the energies before fine-tuning
    hinge_weight = 0.1

    @torch.enable_grad()
    def finish(
        self, z: Tensor, y: Tensor, weight: Tensor, bias: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """CE + weight * (max(0, E(z) - m_in)^2 + max(0, m_out - E(fake))^2) over the head, with E = -logsumexp f."""
        vae = ClassVAE(z, y, self.own, generator)
        head = [weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()]
        with torch.no_grad():
            margin_in = energy(F.linear(z, *head)).quantile(self.margin_in)
            margin_out = energy(F.linear(vae.outliers(self.outliers_for_margin), *head)).quantile(self.margin_out)
        optimiser = torch.optim.Adam(head, lr=self.lr)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(z), generator=generator).to(z.device).split(self.batch_size):
                logits, fake = F.linear(z[rows], *head), F.linear(vae.outliers(self.outliers_a_step), *head)
                hinges = F.relu(energy(logits) - margin_in).square().mean()
                hinges = hinges + F.relu(margin_out - energy(fake)).square().mean()
                optimiser.zero_grad()
                (F.cross_entropy(logits, y[rows]) + self.hinge_weight * hinges).backward()
                optimiser.step()
        return head[0].detach(), head[1].detach()


class ClassVAE:
    """A class-conditional VAE of standardised features, one hidden layer either way, trained when it is made.

    All random numbers come from the generator, on the CPU: the device makes no difference.
    """

    latent = 32  # also the size of a class's embedding
    hidden = 256
    steps, batch_size, lr = 300, 256, 1e-3
    reach = 5.0  # latent points of pseudo-outliers are drawn this many times wider than the prior

    def __init__(self, z: Tensor, y: Tensor, own: int, generator: torch.Generator) -> None:
        self.own, self.generator, self.device = own, generator, z.device
        self.mean, self.deviation = z.mean(dim=0), z.std(dim=0, correction=0)
        dim, latent, hidden = z.shape[1], self.latent, self.hidden
        self.embedding = self._normal(own, latent).requires_grad_()
        self.encoder = [*self._layer(dim + latent, hidden), *self._layer(hidden, 2 * latent)]
        self.decoder = [*self._layer(2 * latent, hidden), *self._layer(hidden, dim)]
        self._fit((z - self.mean) / self.deviation.clamp_min(1e-6), F.one_hot(y, own).float())

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def _layer(self, fan_in: int, fan_out: int) -> tuple[Tensor, Tensor]:
        weight = self._normal(fan_out, fan_in) / math.sqrt(fan_in)
        return weight.requires_grad_(), torch.zeros(fan_out, device=self.device, requires_grad=True)

    def _fit(self, x: Tensor, classes: Tensor) -> None:
        """Squared error / 2 + KL(q(latent | x, class) || N(0, I))."""
        optimiser = torch.optim.Adam([self.embedding, *self.encoder, *self.decoder], lr=self.lr)
        for _ in range(self.steps):
            rows = torch.randint(len(x), (min(self.batch_size, len(x)),), generator=self.generator).to(self.device)
            real, condition = x[rows], classes[rows] @ self.embedding
            centre, log_variance = _mlp(torch.cat([real, condition], dim=1), self.encoder).chunk(2, dim=1)
            latent = centre + (log_variance / 2).exp() * self._normal(len(rows), self.latent)
            error = (_mlp(torch.cat([latent, condition], dim=1), self.decoder) - real).square().sum(dim=1)
            divergence = (centre.square() + log_variance.exp() - log_variance - 1).sum(dim=1)
            optimiser.zero_grad()
            ((error + divergence).mean() / 2).backward()
            optimiser.step()

    @torch.no_grad()
    def decode(self, latent: Tensor, condition: Tensor) -> Tensor:
        """Features `[n, dim]` of latent points under class embeddings, both `[n, latent]`."""
        return self.mean + self.deviation * _mlp(torch.cat([latent, condition], dim=1), self.decoder)

    def outliers(self, count: int) -> Tensor:
        """Pseudo-outliers `[count, dim]`: far latent points under a random coordinate-wise mixture of two classes."""
        first = torch.randint(self.own, (count,), generator=self.generator)
        step = torch.randint(1, max(self.own, 2), (count,), generator=self.generator)
        coin = torch.rand(count, self.latent, generator=self.generator) < 0.5
        classes = torch.where(coin, first.unsqueeze(1), ((first + step) % self.own).unsqueeze(1)).to(self.device)
        return self.decode(self.reach * self._normal(count, self.latent), self.embedding.gather(0, classes))


TECHNIQUES: dict[str, type[Technique]] = {
    t.name: t for t in (Technique, CMG, VOS, OE, MixOE, LogitNorm, MCDropout, Mixup, CutMix)
}


# What several techniques share


def energy(logits: Tensor) -> Tensor:
    """-logsumexp f."""
    return -logits.logsumexp(dim=1)


def to_uniform(logits: Tensor) -> Tensor:
    """Cross-entropy of every row to the uniform distribution: logsumexp f - mean f."""
    return logits.logsumexp(dim=1) - logits.mean(dim=1)


def mixed_entropy(logits: Tensor, labels: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """The mean cross-entropy to `share` of a row's label and the rest of its partner's."""
    own, other = (F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="none") for y in (labels, others))
    return masked_mean(torch.lerp(other, own, share), labels != IGNORED)


def partners(labels: Tensor, draws: Tensor) -> Tensor:
    """For every row another one to mix it with, `[b]`: the next in a random cycle through all rows that count.

    A row that is ignored, or counts alone, is its own partner.
    """
    ignored = labels == IGNORED
    order = (draws[: len(labels)] + ignored).argsort(stable=True)  # a draw is below 1: ignored rows come last
    place = torch.arange(len(labels), device=labels.device)
    counted = (~ignored).sum()
    following = torch.where(place < counted, (place + 1) % counted.clamp_min(1), place)
    return torch.empty_like(order).scatter(0, order, order[following])


def box(size: tuple[int, int], share: Tensor, draws: Tensor) -> Tensor:
    """A box, true inside, in images of this size `[h, w]`; it covers about `share` `[1]` of them.

    Its centre is drawn from all pixels; what would lie beyond the edge is cut off.
    """
    inside = []
    for length, draw in zip(size, draws.split(1), strict=True):
        pixel = torch.arange(length, device=draws.device)
        half, centre = (length * share.sqrt() / 2).floor(), (length * draw).floor()
        inside.append((pixel >= centre - half) & (pixel < centre + half))
    return torch.logical_and(inside[0].unsqueeze(1), inside[1])


def swapped_quarters(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Images `[n, c, h, w]` whose four quarters are permuted cyclically, by one, two or three places.

    They have a task's colours and textures but show none of its objects: outliers where nothing is stored yet.
    """
    high, wide = pixels.shape[2] // 2, pixels.shape[3] // 2
    corners = [(top, left) for top in (0, high) for left in (0, wide)]
    quarters = torch.stack([pixels[:, :, top : top + high, left : left + wide] for top, left in corners], dim=1)
    by = torch.randint(1, 4, (len(pixels), 1), generator=generator)
    order = ((torch.arange(4) + by) % 4).to(pixels.device)
    moved = quarters[torch.arange(len(pixels), device=pixels.device).unsqueeze(1), order]
    image = pixels.clone()  # of an odd number of rows or columns the last one stays
    for number, (top, left) in enumerate(corners):
        image[:, :, top : top + high, left : left + wide] = moved[:, number]
    return image


def _mlp(x: Tensor, layers: list[Tensor]) -> Tensor:
    return F.linear(F.relu(F.linear(x, *layers[:2])), *layers[2:])
