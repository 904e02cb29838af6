"""What `import workbench as wb` has: type checkers read it, and `__init__.py`, which imports each name at first use."""

from workbench import analysis as analysis
from workbench import distributed as distributed
from workbench import explorers as explorers
from workbench import fit as fit
from workbench import models as models
from workbench import patterns as patterns
from workbench import plots as plots
from workbench import probes as probes
from workbench import report as report
from workbench import scaling as scaling
from workbench import streaming as streaming
from workbench.analysis.mass import captured_mass as captured_mass
from workbench.engines.cache import Cache as Cache
from workbench.engines.dispatch import attention as attention
from workbench.engines.dispatch import explain as explain
from workbench.engines.layers import MultiheadAttention as MultiheadAttention
from workbench.engines.reference import reference as reference
from workbench.fit import cards as cards
from workbench.fit.virtual_card import VirtualCard as VirtualCard
from workbench.harness import machine as machine
from workbench.harness import records as records
from workbench.models.transformer import LongNet as LongNet
from workbench.models.transformer import Transformer as Transformer
from workbench.patterns import BlockSparse as BlockSparse
from workbench.patterns import Dense as Dense
from workbench.patterns import Dilated as Dilated
from workbench.patterns import Neighborhood as Neighborhood
from workbench.patterns import PerHead as PerHead
from workbench.patterns import Predicate as Predicate
from workbench.patterns import Window as Window
from workbench.patterns import layouts as layouts
from workbench.patterns import orderings as orderings
from workbench.patterns import swin as swin
from workbench.patterns.tile_order import tile_order as tile_order

__version__: str

def files_of(folder: str, **homes: str): ...
