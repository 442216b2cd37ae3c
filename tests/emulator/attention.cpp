#include "ptx.cuh"
#include "types.cuh"
#define HEADS 8
#define KV_HEADS 2
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define BLOCK 64
#ifndef STORE
#define STORE 0
#endif
#ifndef ROW_WARPS
#define ROW_WARPS 4
#endif
#define WINDOW 0
#define reduce reduce_rope
#define WARPS WARPS_ROPE
namespace rope {
#include "../../kernels/rope_store.cu"
}
#undef reduce
#undef WARPS
#undef LEAST
namespace att {
#include "../../kernels/attention.cu"
}
#undef GROUP
#undef THREADS
namespace mer {
#include "../../kernels/merge.cu"
}
#include <chrono>
namespace emulator { int launch(void (*)(void*), void*, const unsigned*, const unsigned*, size_t, unsigned); }
template<class K> int run(K k, std::vector<void*> args, unsigned gx, unsigned gy, unsigned bx, size_t sh, unsigned seed){
  static K kk; kk=k; static std::vector<void*>* a; a=&args; unsigned g[]={gx,gy,1},b[]={bx,1,1};
  return emulator::launch([](void*){emulator::call(kk,a->data());},nullptr,g,b,sh,seed);
}
float rnd(){return rand()/(float)RAND_MAX*2-1;}
int main(){
  // sequences: (computed before, new)
  std::vector<std::pair<int,int>> seqs={{0,20},{150,1},{60,20},{130,3},{300,2}};
  int T=0; std::vector<u32> positions,slots,tables; std::vector<u32> table_of; u32 next=1;
  const int W=(HEADS+2*KV_HEADS)*HEAD_DIM;
  int blocks=1; for(auto&s:seqs)blocks+=(s.first+s.second+63)/64;
  int size=STORE==2?2:1;
  std::vector<u8> keys((size_t)blocks*KV_HEADS*BLOCK*HEAD_DIM*size,0),values(keys.size(),0); std::vector<float> ks(blocks*KV_HEADS*BLOCK,NAN),vs(ks);
  // store all tokens (history too) through rope_store with zero rotation angle: cos=1,sin=0
  std::vector<Bf16> all; std::vector<u32> allpos,allslot; std::vector<int> first_all;
  std::vector<u32> step_tokens;
  for(auto&s:seqs){table_of.push_back(tables.size()); int n=s.first+s.second; for(int b=0;b<(n+63)/64;b++)tables.push_back(next++); first_all.push_back(allpos.size());
    for(int p=0;p<n;p++){allpos.push_back(p);allslot.push_back(tables[table_of.back()+p/64]*64+p%64);for(int i=0;i<W;i++)all.push_back(to_bf16(rnd()*2));}}
  std::vector<float> rot(400*HEAD_DIM,0); for(int p=0;p<400;p++)for(int d=0;d<HEAD_DIM/2;d++){rot[p*HEAD_DIM+d]=std::cos(p*0.01*d);rot[p*HEAD_DIM+HEAD_DIM/2+d]=std::sin(p*0.01*d);}
  auto raw=all;
  Bf16*qkv=all.data();const float*rp=rot.data();const u32*pp=allpos.data();const u32*sp=allslot.data();const Bf16*nn=nullptr;float eps=1e-6;void*kp=keys.data(),*vp=values.data();float*ksp=ks.data(),*vsp=vs.data();
  int rc=run(rope::rope_store,{&qkv,&rp,&pp,&sp,&nn,&nn,&eps,&kp,&vp,&ksp,&vsp},allpos.size(),(HEADS+2*KV_HEADS+3)/4,128,0,3);
  printf("rope rc %d\n",rc);
  // step: new tokens only
  std::vector<Bf16> step; std::vector<u32> pos; std::vector<att::Item> items; std::vector<u32> queries; std::vector<u32> mt,mf; std::vector<mer::Part> parts; u32 part=0;
  const int per=ROW_WARPS*16/(HEADS/KV_HEADS); std::vector<std::pair<int,int>> who;
  for(size_t s=0;s<seqs.size();s++){
    std::vector<int> mine; for(int i=0;i<seqs[s].second;i++){int p=seqs[s].first+i; mine.push_back(pos.size()); pos.push_back(p); who.push_back({(int)s,p}); auto*f=&all[(first_all[s]+p)*(size_t)W]; step.insert(step.end(),f,f+W);}
    for(size_t i=0;i<mine.size();i+=per){u32 n=std::min<size_t>(per,mine.size()-i); u32 fq=queries.size(); for(u32 j=0;j<n;j++)queries.push_back(mine[i+j]);
      u32 to=pos[mine[i+n-1]]+1;
      if(s%2==0) items.push_back({fq,n,table_of[s],0,to,0xffffffffu});
      else { u32 p0=part; for(u32 from=0;from<to;from+=64){items.push_back({fq,n,table_of[s],from,std::min(to,from+64),part++});}
        for(u32 j=0;j<n;j++){mt.push_back(mine[i+j]);mf.push_back(parts.size());for(u32 x=p0;x<part;x++)parts.push_back({x,j});} }
    }}
  mf.push_back(parts.size());
  std::vector<Bf16> out(pos.size()*HEADS*HEAD_DIM,Bf16{0x7fff}); std::vector<float> psum((size_t)(part+1)*KV_HEADS*ROW_WARPS*16*HEAD_DIM,NAN),pst((size_t)(part+1)*KV_HEADS*ROW_WARPS*16*2,NAN);
  for(unsigned seed:{0u,5u}){
  const Bf16*q=step.data();const u8*k8=keys.data(),*v8=values.data();const float*k_=ks.data(),*v_=vs.data();const att::Item*it=items.data();const u32*qu=queries.data(),*po=pos.data(),*ta=tables.data();float scale=1/std::sqrt((float)HEAD_DIM);Bf16*o=out.data();float*ps=psum.data(),*pt=pst.data();
  auto t=std::chrono::steady_clock::now();
  rc=run(att::attention,{&q,&k8,&v8,&k_,&v_,&it,&qu,&po,&ta,&scale,&o,&ps,&pt},items.size(),KV_HEADS,ROW_WARPS*32,2*(2*BLOCK*HEAD_DIM*size+512),seed);
  double ms=std::chrono::duration<double>(std::chrono::steady_clock::now()-t).count()*1e3;
  const u32*mtp=mt.data(),*mfp=mf.data();const mer::Part*mpp=parts.data();const float*psc=ps,*ptc=pt;
  int rc2=run(mer::merge,{&mtp,&mfp,&mpp,&psc,&ptc,&o},mt.size(),1,128,0,seed);
  // reference in doubles from unquantised rotated k and raw v
  double worst=0,err=0,norm=0;
  for(size_t i=0;i<who.size();i++){int s=who[i].first,p=who[i].second;
   for(int h=0;h<HEADS;h++){std::vector<double> w(p+1);double m=-1e300,l=0;int kv=h/(HEADS/KV_HEADS);
    for(int j=0;j<=p;j++){double dot=0;
      for(int d=0;d<HEAD_DIM;d++){int half=HEAD_DIM/2;auto*kr=&raw[(first_all[s]+j)*(size_t)W+(HEADS+kv)*HEAD_DIM];double a=widen(kr[d%half]),b=widen(kr[d%half+half]),c=rot[j*HEAD_DIM+d%half],sn=rot[j*HEAD_DIM+half+d%half];double kd=d<half?a*c-b*sn:b*c+a*sn;
        dot+=widen(step[i*W+h*HEAD_DIM+d])*kd;}
      w[j]=dot*scale;m=std::max(m,w[j]);}
    for(auto&x:w){x=std::exp(x-m);l+=x;}
    for(int d=0;d<HEAD_DIM;d++){double y=0;for(int j=0;j<=p;j++)y+=w[j]*widen(raw[(first_all[s]+j)*(size_t)W+(HEADS+KV_HEADS+kv)*HEAD_DIM+d]);y/=l;double g=widen(out[(i*HEADS+h)*HEAD_DIM+d]);double e=std::fabs(g-y);if(!(e<=worst))worst=e;err+=e*e;norm+=y*y;}}}
  printf("store %d dim %d warps %d seed %u: rc %d %d worst %g relative %g, %.0f ms\n",STORE,HEAD_DIM,ROW_WARPS,seed,rc,rc2,worst,std::sqrt(err/norm),ms);}
}
