"""Every technique, one line each. The loader, `compose` and the contract suite go by this table."""

from __future__ import annotations

from thrice.runtime.technique import Technique
from thrice.techniques.attention import Attention
from thrice.techniques.compile import Compile
from thrice.techniques.data_parallel import DataParallel
from thrice.techniques.optimizer_in_backward import OptimizerInBackward
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute
from thrice.techniques.sync_batchnorm import SyncBatchNorm
from thrice.techniques.vocabulary_loss import VocabularyLoss
from thrice.techniques.zero_stage import ZeroStage

TECHNIQUES: dict[str, type[Technique]] = {
    Precision.name: Precision,
    Recompute.name: Recompute,
    SyncBatchNorm.name: SyncBatchNorm,
    Attention.name: Attention,
    VocabularyLoss.name: VocabularyLoss,
    Compile.name: Compile,
    ZeroStage.name: ZeroStage,
    DataParallel.name: DataParallel,
    OptimizerStates.name: OptimizerStates,
    OptimizerInBackward.name: OptimizerInBackward,
}
