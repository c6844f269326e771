"""The codebooks of the IQ types: constants of the format, without which no block can be read.

A codebook is a set of points whose coordinates take a few values, listed in rising order of the
point read as a number (first coordinate lowest). So one bit for each possible point says it all;
the bits are compressed and written in base 85.

Source of the constants: ggml's ggml-common.h (iq2xxs_grid, iq2xs_grid, iq2s_grid, iq3xxs_grid,
iq3s_grid, iq1s_grid).
"""

from __future__ import annotations

import base64
import functools
import zlib

import numpy as np
import torch

_IQ2_XXS = (
    b"c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is"
    b"&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>"
    b"sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF"
    b"=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
)
_IQ2_XS = (
    b"c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w"
    b"(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+"
    b"vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC"
    b"_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYM"
    b"NuDE=SK;cc#9vM%q_=>7msuqjC"
)
_IQ2_S = (
    b"c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj"
    b"@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1"
    b"x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT"
    b"82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!"
    b")+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6"
)
_IQ3_XXS = (
    b"c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)"
    b"&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIb"
    b"F!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@"
    b"kmBo4W|8$?wEo20v5Uy_5"
)
_IQ3_S = (
    b"c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0"
    b"~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wu"
    b"C)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA"
    b"@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^"
    b"vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
)
_IQ1_S = (
    b"c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT"
    b"8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~"
    b"@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^I"
    b"s3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(V"
    b"lG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_OntvSw2GXTKiD_6X"
    b"GLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@y"
    b"PMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kd"
    b"O91c}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6"
    b"e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56"
    b"qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1"
)

_IQ2_VALUES = (8.0, 25.0, 43.0)
# type -> values of a coordinate, number of coordinates, compressed set of points
_CODEBOOKS = {
    "IQ2_XXS": (_IQ2_VALUES, 8, _IQ2_XXS),
    "IQ2_XS": (_IQ2_VALUES, 8, _IQ2_XS),
    "IQ2_S": (_IQ2_VALUES, 8, _IQ2_S),
    "IQ3_XXS": ((4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0), 4, _IQ3_XXS),
    "IQ3_S": ((1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0), 4, _IQ3_S),
    "IQ1_S": ((-1.0, 0.0, 1.0), 8, _IQ1_S),
}


@functools.cache
def codebook(kind: str) -> torch.Tensor:
    """float32 [points, coordinates] of "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S" or "IQ1_S"
    (which IQ1_M shares). Shared: for reading only."""
    values, num_coordinates, packed = _CODEBOOKS[kind]
    bits = np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8)
    points = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    digits = points[:, None] // len(values) ** np.arange(num_coordinates) % len(values)
    return torch.from_numpy(np.array(values, np.float32)[digits])


@functools.cache
def sign_patterns() -> torch.Tensor:
    """float32 [256, 8] of -1 and 1: entry b has -1 at coordinate i where bit i of b is set."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return torch.from_numpy((1 - 2 * bits).astype(np.float32))


@functools.cache
def even_sign_patterns() -> torch.Tensor:
    """float32 [128, 8]: the patterns with an even number of -1. Seven bits are stored; the eighth
    makes the number even."""
    seven = np.arange(128)
    parity = (seven[:, None] >> np.arange(7) & 1).sum(axis=1) & 1
    return sign_patterns()[torch.from_numpy(seven | parity << 7)]
