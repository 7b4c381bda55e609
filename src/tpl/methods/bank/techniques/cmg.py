"""CMG: a generator conditioned on mixed classes makes pseudo-outliers; the head is fine-tuned against them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.methods.bank.techniques.base import Technique

LATENT = 32  # also the size of a class's embedding
HIDDEN = 256
GENERATOR_STEPS, GENERATOR_BATCH, GENERATOR_LR = 300, 256, 1e-3
REACH = 5.0  # latent points of pseudo-outliers are drawn this many times wider than the prior

EPOCHS, BATCH, LR = 15, 64, 1e-4  # of the head
FAKES = 128  # pseudo-outliers a step
MARGIN_FAKES = 1024  # pseudo-outliers whose energies give the margin
MARGIN_IN, MARGIN_OUT = 0.2, 0.8  # quantiles of the energies before fine-tuning
WEIGHT = 0.1  # of the hinges on the energies


class CMG(Technique):
    """Plain training, then fine-tuning of the head alone by energy (CMG-e), all in feature space."""

    name = "cmg"
    summary = "head fine-tuned against features that a VAE makes for mixed classes"
    paper = "Wang et al., CMG: A Class-Mixed Generation Approach to Out-of-Distribution Detection, ECML PKDD 2022"

    @torch.enable_grad()
    def finish(
        self, z: Tensor, y: Tensor, weight: Tensor, bias: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """CE + weight * (max(0, E(z) - m_in)^2 + max(0, m_out - E(fake))^2) over the head, with E = -logsumexp f."""
        vae = ClassVAE(z, y, self.own, generator)
        head = [weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()]
        with torch.no_grad():
            margin_in = energy(F.linear(z, *head)).quantile(MARGIN_IN)
            margin_out = energy(F.linear(vae.fakes(MARGIN_FAKES), *head)).quantile(MARGIN_OUT)
        optimiser = torch.optim.Adam(head, lr=LR)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(z), generator=generator).to(z.device).split(BATCH):
                logits, fake = F.linear(z[rows], *head), F.linear(vae.fakes(FAKES), *head)
                hinges = F.relu(energy(logits) - margin_in).square().mean()
                hinges = hinges + F.relu(margin_out - energy(fake)).square().mean()
                optimiser.zero_grad()
                (F.cross_entropy(logits, y[rows]) + WEIGHT * hinges).backward()
                optimiser.step()
        return head[0].detach(), head[1].detach()


def energy(logits: Tensor) -> Tensor:
    """-logsumexp f."""
    return -logits.logsumexp(dim=1)


class ClassVAE:
    """A class-conditional VAE of standardised features, one hidden layer either way, trained when it is made.

    All random numbers come from the generator, on the CPU: the device makes no difference.
    """

    def __init__(self, z: Tensor, y: Tensor, own: int, generator: torch.Generator) -> None:
        self.own, self.generator, self.device = own, generator, z.device
        self.mean, self.deviation = z.mean(dim=0), z.std(dim=0, correction=0)
        dim = z.shape[1]
        self.embedding = self._normal(own, LATENT).requires_grad_()
        self.encoder = [*self._layer(dim + LATENT, HIDDEN), *self._layer(HIDDEN, 2 * LATENT)]
        self.decoder = [*self._layer(2 * LATENT, HIDDEN), *self._layer(HIDDEN, dim)]
        self._fit((z - self.mean) / self.deviation.clamp_min(1e-6), F.one_hot(y, own).float())

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def _layer(self, fan_in: int, fan_out: int) -> tuple[Tensor, Tensor]:
        weight = self._normal(fan_out, fan_in) / math.sqrt(fan_in)
        return weight.requires_grad_(), torch.zeros(fan_out, device=self.device, requires_grad=True)

    def _fit(self, x: Tensor, classes: Tensor) -> None:
        """Squared error / 2 + KL(q(latent | x, class) || N(0, I))."""
        optimiser = torch.optim.Adam([self.embedding, *self.encoder, *self.decoder], lr=GENERATOR_LR)
        for _ in range(GENERATOR_STEPS):
            rows = torch.randint(len(x), (min(GENERATOR_BATCH, len(x)),), generator=self.generator).to(self.device)
            real, condition = x[rows], classes[rows] @ self.embedding
            centre, log_variance = _mlp(torch.cat([real, condition], dim=1), self.encoder).chunk(2, dim=1)
            latent = centre + (log_variance / 2).exp() * self._normal(len(rows), LATENT)
            error = (self._decode(latent, condition) - real).square().sum(dim=1)
            divergence = (centre.square() + log_variance.exp() - log_variance - 1).sum(dim=1)
            optimiser.zero_grad()
            ((error + divergence).mean() / 2).backward()
            optimiser.step()

    def _decode(self, latent: Tensor, condition: Tensor) -> Tensor:
        return _mlp(torch.cat([latent, condition], dim=1), self.decoder)

    @torch.no_grad()
    def fakes(self, count: int) -> Tensor:
        """Pseudo-outliers `[count, dim]`: far latent points; a coin says of which of two classes each coordinate is."""
        first = torch.randint(self.own, (count,), generator=self.generator)
        step = torch.randint(1, max(self.own, 2), (count,), generator=self.generator)
        coin = torch.rand(count, LATENT, generator=self.generator) < 0.5
        classes = torch.where(coin, first.unsqueeze(1), ((first + step) % self.own).unsqueeze(1)).to(self.device)
        made = self._decode(REACH * self._normal(count, LATENT), self.embedding.gather(0, classes))
        return self.mean + self.deviation * made


def _mlp(x: Tensor, layers: list[Tensor]) -> Tensor:
    return F.linear(F.relu(F.linear(x, *layers[:2])), *layers[2:])
